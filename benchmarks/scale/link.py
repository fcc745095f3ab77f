"""The way between the controller and the scripted server: what `kube.connection.Connection` does, over a Unix socket.

A request is one frame, so is an answer; a watch has a socket of its own, and its lines follow the answer.
What HTTP and TLS cost is left out.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from driver_manager.errors import Unreachable
from driver_manager.kube.calls import Call
from driver_manager.kube.refusals import refusal

CHUNK: Final = 64 * 1024


class Request(msgspec.Struct, array_like=True):
    """A request on its way."""

    made: float
    """When, by the clock that all processes of a machine share."""
    verb: str
    resource: str
    path: str
    query: dict[str, str]
    body: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Request).decode
_HEAD: Final = struct.Struct("!IH")
"""Length and status."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next one. Raises IncompleteReadError at the end."""
    size, _ = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return _decode(await reader.readexactly(size))


def write_answer(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    """Answers a request."""
    writer.writelines((_HEAD.pack(len(body), status), body))


class Link:
    """Stands where the controller has its Connection: as many sockets, the same times, the same errors."""

    def __init__(self, path: str, connections: int, request_timeout: float) -> None:
        self._path, self._timeout = path, request_timeout
        self._room = asyncio.Semaphore(connections)
        self._idle: list[Streams] = []

    async def _send(self, call: Call) -> tuple[Streams, int, bytes]:
        made = time.monotonic()
        body = msgspec.json.encode(call.body) if call.body is not None else b""
        frame = _encode(Request(made, call.verb, call.resource, call.path, dict(call.query), body))
        await self._room.acquire()
        streams: Streams | None = None
        try:
            streams = self._idle.pop() if self._idle else await asyncio.open_unix_connection(self._path, limit=CHUNK)
            streams[1].writelines((_HEAD.pack(len(frame), 0), frame))
            size, status = _HEAD.unpack(await streams[0].readexactly(_HEAD.size))
            return streams, status, await streams[0].readexactly(size)
        except BaseException:
            if streams is not None:
                streams[1].close()
            self._room.release()
            raise

    async def _ask(self, call: Call) -> tuple[Streams, bytes]:
        try:
            async with asyncio.timeout(self._timeout):
                streams, status, body = await self._send(call)
        except (OSError, EOFError, TimeoutError) as error:
            raise Unreachable(f"{call}: no answer: {error or type(error).__name__}") from error
        if status >= 400:
            self._give_back(streams)
            raise refusal(call, status, body, "")
        return streams, body

    def _give_back(self, streams: Streams) -> None:
        self._idle.append(streams)
        self._room.release()

    async def answer(self, call: Call) -> bytes:
        """Sends a request and gives the body of a successful answer."""
        streams, body = await self._ask(call)
        self._give_back(streams)
        return body

    @asynccontextmanager
    async def lines(self, call: Call, seconds: float) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Sends a request whose answer comes line by line."""
        streams, _ = await self._ask(call)
        try:
            yield self._split(call, streams[0])  # the server ends it in time
        finally:
            streams[1].close()
            self._room.release()

    async def _split(self, call: Call, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
        pieces: list[bytes] = []
        try:
            while chunk := await reader.read(CHUNK):
                head, *lines = chunk.split(b"\n")
                pieces.append(head)
                for line in lines:
                    yield b"".join(pieces)
                    pieces = [line]
        except OSError as error:
            raise Unreachable(f"{call}: the watch broke off") from error

    async def close(self) -> None:
        """Closes all sockets."""
        for _, writer in self._idle:
            writer.close()
