"""`/healthz`, `/readyz` and `/metrics` over HTTP. The one place where the controller meets aiohttp, which comes with kubernetes.

Answers are made from what the replica holds in memory, so that asking costs the API server nothing. Nobody is asked who he is: there are
names of states and policies in the answers, nothing else, and no request changes anything.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from driver_manager.controller.health import Answer, health, readiness
from driver_manager.controller.metrics import CONTENT_TYPE, exposition
from driver_manager.controller.run import Replica
from driver_manager.errors import ConfigError

MAX_LINE: Final = 2048
"""Bytes of a request's lines and headers: a probe needs few."""
STOP_SECONDS: Final = 1.0
"""How long a client that reads slowly is waited for at the end."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(replica: Replica, listen: str) -> AsyncIterator[str]:
    """Answers while it is entered; gives the address that it listens on, empty for none.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")
    application = web.Application()
    application.router.add_get("/healthz", _answering(lambda: health(replica)))
    application.router.add_get("/readyz", _answering(lambda: readiness(replica)))
    application.router.add_get("/metrics", _metrics(replica))
    runner = web.AppRunner(
        application, access_log=None, handle_signals=False, shutdown_timeout=STOP_SECONDS, max_line_size=MAX_LINE, max_field_size=MAX_LINE
    )
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host.strip("[]") or None, int(port))
            await site.start()
        except OSError as error:
            hint = "--listen: another address, or empty for none"
            raise ConfigError(f"cannot listen on {listen}: {error.strerror}", hint=hint) from error
        yield _address(runner)
    finally:
        await runner.cleanup()


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _answering(ask: Callable[[], Answer]) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        answer = ask()
        return web.Response(status=200 if answer.is_well else 503, text=answer.sentence + "\n")

    return handle


def _metrics(replica: Replica) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=exposition(replica), headers={"Content-Type": CONTENT_TYPE})

    return handle
