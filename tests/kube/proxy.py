"""A proxy in front of the apiserver that holds, fails, slows and loses answers as told, and writes down what passed.

    with ApiProxy(control_plane) as proxy:
        config = proxy.kubeconfig("driver", token)
        pause = proxy.on("patch", r"/nodes/gpu-1$").hold_answer()  # done, but the client does not know
        proxy.on("list", r"/pods", nth=2).answer(503, headers={"Retry-After": "1"})
        agent = start(config)
        pause.wait_hit()
        agent.kill()
        pause.release()
        [(seen.verb, seen.path, seen.status) for seen in proxy.requests()]

A rule is named by verb (get, list, watch, create, update, patch, delete, deletecollection, or the HTTP method in
capitals) and a regular expression that is searched in path and query, if need be another one that is searched in the
body; `nth` counts the requests that match. The
first rule that applies is the one obeyed, and a rule obeys once unless `times` says otherwise (None: always).

It serves TLS with the apiserver's own certificate, so a client trusts both alike; HTTP/1.1, watches are streamed. It
runs on a thread with an event loop of its own, so that tests of either kind and other processes can use it. All
methods are for the test's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import yarl
from aiohttp import web

from tests.kube.controlplane import ControlPlane

T = TypeVar("T")
Fault = Literal["none", "hold answer", "hold request", "answer", "delay", "lose answer", "refuse"]
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}
REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(slots=True)
class Seen:
    """One request that came to the proxy."""

    at: float
    """time.monotonic() at its arrival."""
    verb: str
    method: str
    path: str
    """With the query."""
    body: bytes
    status: int | None = None
    """What the client was told; None while it waits, or where it was told nothing."""
    answered_at: float | None = None
    """time.monotonic() when the answer began."""
    fault: Fault = "none"
    passed: bool = False
    """Whether the apiserver got it."""

    def json(self) -> Any:
        """The body of the request."""
        return json.loads(self.body)


class Rule:
    """What to do with the requests that match; made by `ApiProxy.on`."""

    def __init__(self, proxy: ApiProxy, verb: str, path: str, body: str, nth: int | None, times: int | None) -> None:
        self._proxy = proxy
        self._verb, self._path, self._nth, self._times = verb, re.compile(path), nth, times
        self._in_body = re.compile(body.encode())
        self._matched = 0
        self.fault: Fault = "none"
        self.obeyed: list[Seen] = []
        """The requests that this rule was applied to."""
        self.status, self.headers, self.body, self.seconds = 0, dict[str, str](), b"", 0.0
        self._was_hit = threading.Event()
        self.open = asyncio.Event()

    def hold_answer(self) -> Rule:
        """The apiserver does it, the client hears of it only after release()."""
        return self._set("hold answer")

    def hold_request(self) -> Rule:
        """The apiserver gets it only after release()."""
        return self._set("hold request")

    def lose_answer(self) -> Rule:
        """The apiserver does it, and the connection breaks before the answer."""
        return self._set("lose answer")

    def refuse(self) -> Rule:
        """The connection breaks, and the apiserver gets nothing."""
        return self._set("refuse")

    def delay(self, seconds: float) -> Rule:
        """The request waits before it passes."""
        self.seconds = seconds
        return self._set("delay")

    def answer(self, status: int, body: Mapping[str, Any] | str | None = None, *, headers: Mapping[str, str] | None = None) -> Rule:
        """The apiserver gets nothing; the client is told this, without a body a Status of that code."""
        if body is None:
            reason = REASONS.get(status, "")
            about: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            body = about | {"message": f"the proxy answers {status}", "reason": reason, "code": status}
        kind = "text/plain; charset=utf-8" if isinstance(body, str) else "application/json"
        self.status, self.headers = status, {"Content-Type": kind, **(headers or {})}
        self.body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return self._set("answer")

    def release(self) -> None:
        """Lets go of what is held, now and later."""
        self._proxy.in_loop(self.open.set)

    def wait_hit(self, timeout: float = 30.0) -> Seen:
        """Waits for the first request that the rule was applied to; for hold_answer: until it is done."""
        if not self._was_hit.wait(timeout):
            raise AssertionError(f"waited {timeout} s for {self._verb} {self._path.pattern}")
        return self.obeyed[0]

    async def hit(self, timeout: float = 30.0) -> Seen:
        """`wait_hit` for tests that are coroutines."""
        return await asyncio.to_thread(self.wait_hit, timeout)

    def applies_to(self, seen: Seen) -> bool:
        """Whether this request is to be spoiled; counts those that match."""
        if self._verb not in (seen.verb, seen.method, "*") or not self._path.search(seen.path) or not self._in_body.search(seen.body):
            return False
        self._matched += 1
        if self._nth is not None and self._matched < self._nth:
            return False
        return self._times is None or len(self.obeyed) < self._times

    def was_hit(self) -> None:
        """Wakes who waits for it."""
        self._was_hit.set()

    def _set(self, fault: Fault) -> Rule:
        self.fault = fault
        self._proxy.in_loop(lambda: self._proxy.rules.append(self))
        return self


class ApiProxy:
    """The proxy, up inside `with`."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.control_plane = control_plane
        self.rules: list[Rule] = []
        self.port = 0
        self._seen: list[Seen] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-proxy", daemon=True)

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"https://127.0.0.1:{self.port}"

    def kubeconfig(self, user: str = "admin", token: str | None = None) -> Path:
        """A kubeconfig whose server is this proxy."""
        return self.control_plane.kubeconfig(user, token, server=self.url)

    def on(self, verb: str, path: str, *, body: str = "", nth: int | None = None, times: int | None = 1) -> Rule:
        """Begins a rule; say next what it does, e.g. `.hold_answer()`."""
        return Rule(self, verb, path, body, nth, times)

    def clear(self) -> None:
        """Forgets all rules, and lets go of what they hold."""

        def forget() -> None:
            for rule in self.rules:
                rule.open.set()
            self.rules.clear()

        self.in_loop(forget)

    def requests(self, verb: str = "*", path: str = "") -> list[Seen]:
        """What came so far, oldest first."""
        pattern = re.compile(path)
        return [s for s in list(self._seen) if verb in (s.verb, s.method, "*") and pattern.search(s.path)]

    def cut(self) -> None:
        """Breaks all connections, watches among them; new ones are taken."""
        self._call(self._cut())

    def refuse_connections(self) -> None:
        """Breaks all connections and takes no new one until accept_connections()."""

        async def refuse() -> None:
            self._listener.close()
            await self._cut()

        self._call(refuse())

    def accept_connections(self) -> None:
        """Listens again, on the same port."""
        self._call(self._listen())

    @contextlib.contextmanager
    def outage(self) -> Any:
        """No connection is taken for the length of a block."""
        self.refuse_connections()
        try:
            yield
        finally:
            self.accept_connections()

    def in_loop(self, action: Any) -> None:
        """Does something on the proxy's thread, and returns when it is done."""

        async def act() -> None:
            action()

        self._call(act())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        trust = ssl.create_default_context(cafile=str(self.control_plane.ca))
        self._upstream = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trust),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        await self._listen()

    async def _listen(self) -> None:
        served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        served.load_cert_chain(self.control_plane.ca, self.control_plane.key)
        self._listener = await self._loop.create_server(self._server, "127.0.0.1", self.port, ssl=served)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        for rule in self.rules:
            rule.open.set()
        self._listener.close()
        await self._cut()
        await self._server.shutdown(1)
        await self._upstream.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0.05)  # TLS transports close one turn later

    async def _cut(self) -> None:
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        seen = Seen(time.monotonic(), verb_of(request), request.method, request.path_qs, await request.content.read())
        self._seen.append(seen)
        rule = next((rule for rule in list(self.rules) if rule.applies_to(seen)), None)
        if rule is not None:
            rule.obeyed.append(seen)
            seen.fault = rule.fault
        match rule:
            case Rule(fault="answer"):
                rule.was_hit()
                return self._answered(seen, web.Response(status=rule.status, headers=rule.headers, body=rule.body))
            case Rule(fault="refuse"):
                rule.was_hit()
                return self._broken(request)
            case Rule(fault="hold request"):
                rule.was_hit()
                await rule.open.wait()
            case Rule(fault="delay"):
                rule.was_hit()
                await asyncio.sleep(rule.seconds)
        async with self._passed_on(request, seen) as answer:
            if rule is not None and rule.fault == "lose answer":
                rule.was_hit()
                return self._broken(request)
            if rule is not None and rule.fault == "hold answer":
                rule.was_hit()
                await rule.open.wait()
            return await self._stream(request, answer, seen)

    @contextlib.asynccontextmanager
    async def _passed_on(self, request: web.BaseRequest, seen: Seen) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = self.control_plane.url + request.raw_path
        async with self._upstream.request(request.method, yarl.URL(url, encoded=True), data=seen.body or None, headers=headers) as answer:
            seen.passed = True
            yield answer

    async def _stream(self, request: web.BaseRequest, answer: aiohttp.ClientResponse, seen: Seen) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        out = self._answered(seen, web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers))
        if "Content-Length" in answer.headers:
            out.content_length = int(answer.headers["Content-Length"])
        await out.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await out.write(chunk)
        except aiohttp.ClientError:  # the apiserver died in mid-answer: so does ours
            return self._broken(request)
        await out.write_eof()
        return out

    def _answered(self, seen: Seen, out: web.StreamResponse) -> web.StreamResponse:
        seen.status, seen.answered_at = out.status, time.monotonic()
        return out

    def _broken(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def verb_of(request: web.BaseRequest) -> str:
    """The verb as the API knows it."""
    is_named = _names_an_object(request.path)
    match request.method:
        case "GET" if request.query.get("watch") in ("true", "1", "True"):
            return "watch"
        case "GET":
            return "get" if is_named else "list"
        case "DELETE":
            return "delete" if is_named else "deletecollection"
        case method:
            return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


def _names_an_object(path: str) -> bool:
    """Whether a path is of one object (or of no resource at all), not of a collection."""
    parts = path.strip("/").split("/")
    match parts:
        case ["api", _, *rest] | ["apis", _, _, *rest]:
            pass
        case _:
            return True
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    return len(rest) != 1
