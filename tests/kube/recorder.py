"""A watch that writes down what happened and when, for tests that assert an order or measure a time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Condition = Callable[["Event"], bool]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a watch."""

    at: float
    """time.monotonic() when it was read; the same clock for all processes of this machine."""
    kind: str
    """ADDED, MODIFIED or DELETED."""
    object: Object

    @property
    def name(self) -> str:
        """The object's name."""
        return str(self.object["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The object's uid."""
        return str(self.object["metadata"]["uid"])

    @property
    def version(self) -> int:
        """The server's own count, which orders events of all kinds."""
        return int(self.object["metadata"]["resourceVersion"])

    @property
    def told(self) -> str:
        """Version, kind, name and whether it is Ready or on its way out: for a failure's message."""
        meta, conditions = self.object["metadata"], self.object.get("status", {}).get("conditions", [])
        ready = next((each["status"] for each in conditions if each["type"] == "Ready"), "")
        marked = " marked" if "deletionTimestamp" in meta else ""
        closed = " closed" if self.object.get("spec", {}).get("unschedulable") else ""
        return f"{self.version} {self.kind} {self.name} ready={ready}{marked}{closed} at {self.at:.3f}"


class Recorder:
    """Follows one collection from the moment it is entered; made by `ControlPlane.record`.

    What existed already comes first, as ADDED. A thread of its own reads the watch, so that a busy test does not
    blur the times.
    """

    def __init__(self, connect: Callable[[], http.client.HTTPSConnection], token: str, path: str, query: str) -> None:
        self.events: list[Event] = []
        self._connect, self._token, self._path, self._query = connect, token, path, query
        self._known: dict[str, Object] = {}
        self._seen: dict[str, int] = {}
        """Uid -> the newest version that was told of, also of what is gone."""
        self._news = threading.Condition()
        self._link: http.client.HTTPSConnection | None = None
        self._is_over = threading.Event()
        self._is_listed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"record {path}", daemon=True)

    def __enter__(self) -> Recorder:
        """Returns when the collection was listed, so that nothing later is missed."""
        self._thread.start()
        if not self._is_listed.wait(10):
            self.stop()
            raise TimeoutError(f"{self._path} could not be listed within 10 s")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Has all that happened inside, unless that failed."""
        try:
            if kind is None:
                self.until_now()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the watch and its thread."""
        self._is_over.set()
        link = self._link
        if link is not None and link.sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link.sock, socket.SHUT_RDWR)  # the thread reads on the TLS object: leave that alone
        self._thread.join(5)

    def until_now(self, timeout: float = 20.0) -> list[Event]:
        """All events up to this moment, or up to its end. A watch may tell later than a request shows, by more on a busy machine.

        Raises:
            AssertionError: it does not within the time.
        """
        if self._is_over.is_set():
            return list(self.events)
        body = self._read_list(self._connect())
        there = {item["metadata"]["uid"]: int(item["metadata"]["resourceVersion"]) for item in body["items"]}
        version = int(body["metadata"]["resourceVersion"])

        def is_told() -> bool:
            gone = (item for uid, item in self._known.items() if uid not in there)
            is_up = all(self._seen.get(uid, -1) >= version for uid, version in there.items())
            return is_up and not any(int(item["metadata"]["resourceVersion"]) <= version for item in gone)

        with self._news:
            if not self._news.wait_for(is_told, timeout):
                raise AssertionError(f"the watch of {self._path} is {timeout} s behind; had {self.story()[-20:]}")
            return list(self.events)

    def of(self, name: str) -> list[Event]:
        """The events of one object."""
        return [event for event in list(self.events) if event.name == name]

    def first(self, is_it: Condition, since: float = 0.0) -> Event | None:
        """The first event at or after `since` for which the condition holds."""
        return next((event for event in list(self.events) if event.at >= since and is_it(event)), None)

    def wait_for(self, is_it: Condition, what: str = "such an event", since: float = 0.0, timeout: float = 20.0) -> Event:
        """As `first`, but waits for it.

        Raises:
            AssertionError: with the last events, when the time is over.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while (found := self.first(is_it, since)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"waited {timeout} s for {what}; had {self.story()[-20:]}")
                self._news.wait(min(left, 1.0))
        return found

    async def when(self, is_it: Condition, what: str = "such an event", since: float = 0.0, timeout: float = 20.0) -> Event:
        """`wait_for` for tests that are coroutines."""
        return await asyncio.to_thread(self.wait_for, is_it, what, since, timeout)

    def story(self) -> list[tuple[float, str, str, str]]:
        """Seconds since the first event, kind, name and phase of each event: for a failure's message."""
        events = list(self.events)
        return [(round(e.at - events[0].at, 3), e.kind, e.name, str(e.object.get("status", {}).get("phase", ""))) for e in events]

    def _run(self) -> None:
        version = ""
        while not self._is_over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
                version = self._follow(version or self._list())
            self._is_over.wait(0.05)

    def _ask(self, link: http.client.HTTPSConnection, query: str) -> http.client.HTTPResponse:
        link.request("GET", f"{self._path}?{query}", headers={"Authorization": f"Bearer {self._token}"})
        return link.getresponse()

    def _list(self) -> str:
        self._link = self._connect()
        try:
            body = self._read_list(self._link)
        finally:
            self._link = None
        items = {item["metadata"]["uid"]: item for item in body["items"]}
        for uid in self._known.keys() - items.keys():  # went while the watch was away
            self._add("DELETED", self._known[uid])
        for uid, item in items.items():
            if uid not in self._known:
                self._add("ADDED", item)
            elif item["metadata"]["resourceVersion"] != self._known[uid]["metadata"]["resourceVersion"]:
                self._add("MODIFIED", item)
        self._is_listed.set()
        return str(body["metadata"]["resourceVersion"])

    def _read_list(self, link: http.client.HTTPSConnection) -> Object:
        with contextlib.closing(link):
            answer = self._ask(link, self._query)
            body: Object = json.loads(answer.read())
            if answer.status != 200:
                raise ValueError(f"list {self._path}: {body}")
            return body

    def _follow(self, version: str) -> str:
        """Reads a watch to its end; the version to go on from, or nothing where a new list is needed."""
        self._link = self._connect()
        try:
            answer = self._ask(self._link, f"{self._query}&watch=true&allowWatchBookmarks=true&resourceVersion={version}")
            if answer.status != 200:
                return ""
            while not self._is_over.is_set() and (line := answer.readline()):
                event = json.loads(line)
                if event["type"] == "ERROR":  # 410: the version is compacted
                    return ""
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._add(event["type"], event["object"])
        except (OSError, http.client.HTTPException, ValueError):
            return version
        finally:
            self._close()
        return version

    def _close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _add(self, kind: str, body: Object) -> None:
        uid = body["metadata"]["uid"]
        with self._news:
            self._seen[uid] = int(body["metadata"]["resourceVersion"])
            if kind == "DELETED":
                self._known.pop(uid, None)
            else:
                self._known[uid] = body
            self.events.append(Event(time.monotonic(), kind, body))
            self._news.notify_all()
