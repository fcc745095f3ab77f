"""A small API server on loopback that answers as a test tells it, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Reply = Callable[["Api", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class Api:
    """Replies are used up in their order; the last one is for everything that follows."""

    replies: list[Reply] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    runners: list[web.AppRunner] = field(default_factory=list)

    async def listen(self, context: ssl.SSLContext | None = None) -> None:
        """Opens a port on loopback; `url` is the newest one."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self.runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http{'s' if context else ''}://{host}:{port}"

    def will(self, *replies: Reply) -> None:
        self.replies = list(replies)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append(
            Asked(request.method, request.path, dict(request.query), dict(request.headers), json.loads(body) if body else None)
        )
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return await reply(self, request)


class QuickClock:
    """Real time, but a sleep takes none: it only moves the clock on."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return time.monotonic() + sum(self.slept)

    def wall(self) -> str:
        return "2026-01-31T09:00:00Z"

    def epoch(self) -> float:
        return 1_769_850_000.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.001)

    def run_id(self) -> str:
        return "abcdefghij"


def answers(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """Answers with an object as JSON, or with text as it is."""

    async def reply(_: Api, __: web.Request) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(text=body, status=status, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    return reply


def refuses(status: int, message: str = "no", headers: dict[str, str] | None = None, **details: Any) -> Reply:
    """Answers with a Status, as the API server refuses."""
    return answers({"kind": "Status", "status": "Failure", "code": status, "message": message, "details": details}, status, headers)


async def hangs(api: Api, _: web.Request) -> web.StreamResponse:
    """Takes the request and never answers."""
    await api.over.wait()
    return web.Response()


async def drops(_: Api, request: web.Request) -> web.StreamResponse:
    """Takes the request and closes the connection."""
    assert request.transport
    request.transport.abort()
    return web.Response()


def streams(*lines: dict[str, Any] | bytes, stays: bool = False, breaks: bool = False) -> Reply:
    """Answers line by line; then ends, stays open, or breaks off."""

    async def reply(api: Api, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for line in lines:
            await response.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        if breaks:
            assert request.transport
            request.transport.close()
        if stays:
            await api.over.wait()
        return response

    return reply


def pod(name: str, version: int = 1, uid: str = "", **spec: Any) -> dict[str, Any]:
    """A pod as the API writes it."""
    meta = {"namespace": "default", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"nodeName": "n1", "containers": [], **spec}, "status": {"phase": "Running"}}


def pods(*items: dict[str, Any], version: int = 10, token: str = "") -> dict[str, Any]:
    """A PodList as the API writes it."""
    meta = {"resourceVersion": str(version), **({"continue": token} if token else {})}
    return {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": list(items)}


def node(**spec: Any) -> dict[str, Any]:
    """A Node as the API writes it."""
    return {"kind": "Node", "metadata": {"name": "n1", "uid": "u1", "resourceVersion": "7"}, "spec": spec}


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """One line of a watch."""
    return {"type": kind, "object": item}


def bookmark(version: int) -> dict[str, Any]:
    """The line by which the server says how far a watch is."""
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


def expired() -> dict[str, Any]:
    """The line by which the server says that it has forgotten where a watch began."""
    status = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old resource version: 794 (799)"}
    return event("ERROR", status)


def write_kubeconfig(path: Path, server: str, token: str = "", **cluster: Any) -> str:
    """Writes a kubeconfig, as JSON, and gives its path."""
    user = {"token": token} if token else {}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me"}}],
    }
    path.write_text(json.dumps(config))
    return str(path)
