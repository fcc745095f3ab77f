"""A real Kubernetes control plane on loopback, for tests: etcd, apiserver, controller manager and scheduler.

    with ControlPlane() as cp:
        cp.spawn_kubelet()
        node = cp.create("/api/v1/nodes", node_manifest("gpu-1"))
        with cp.record("/api/v1/pods") as pods:
            mark = cp.audit_mark()
            ...
            gone = pods.wait_for(lambda event: event.kind == "DELETED" and event.name == "train-0")
        cp.audit_counts(since=mark, user="system:serviceaccount:gpu-operator:nvidia-driver")

Everything lives in one temporary folder and listens on 127.0.0.1 only: one TCP port (the apiserver's); etcd uses
unix sockets. Several instances run side by side. Standard library only, plus the `openssl` program for one key. All
programs hang below a guard process (guard.py), so nothing outlives the test.

For a person: `python -m tests.kube.controlplane` prints the kubeconfig to use, Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kube import components
from tests.kube.binaries import COMPONENTS, find_programs
from tests.kube.components import USERS, Options
from tests.kube.recorder import Object, Recorder

GARBAGE_PERCENT = "300"
"""GOGC of the programs, 100 by default: several control planes share few processors, and memory is not what is short."""
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
JSON_PATCH, APPLY = "application/json-patch+json", "application/apply-patch+yaml"
GUARD, KUBELET = Path(__file__).parent / "guard.py", Path(__file__).parent / "kubelet.py"


class ControlPlaneError(RuntimeError):
    """The control plane did not come up, or one of its programs died."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of the apiserver; body is parsed JSON where it is JSON, else text."""

    status: int
    headers: Mapping[str, str]
    body: Any


class UnexpectedAnswerError(AssertionError):
    """The apiserver answered with another status than the test counted on."""

    def __init__(self, method: str, path: str, answer: Response) -> None:
        said = answer.body.get("message") if isinstance(answer.body, dict) else answer.body
        super().__init__(f"{method} {path}: {answer.status} {said}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program has used since its start."""

    cpu_seconds: float
    rss_mib: float


@dataclass(kw_only=True)
class ControlPlane:
    """A control plane that is up between start() and stop(), or inside `with` / `async with`."""

    options: Options = field(default_factory=Options)
    components: Sequence[str] = COMPONENTS
    crds: Sequence[Mapping[str, Any]] = ()
    """Made before the controllers start. The garbage collector learns of later ones only at its next look, up to 30
    s on, and until then an orphaning or foreground delete of such an object hangs."""
    keep: bool = False
    """Leave the folder (logs, audit log) behind."""
    start_timeout: float = 60.0
    dir: Path = field(init=False)
    url: str = field(init=False)
    tokens: dict[str, str] = field(init=False)
    started_in: float = field(init=False, default=0.0)

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> ControlPlane:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when the apiserver is ready and the controllers work.

        Raises:
            ProgramsMissingError: a program is nowhere to be found.
            ControlPlaneError: it did not come up within start_timeout.
        """
        begun = time.monotonic()
        self._programs = find_programs()
        self.dir = Path(tempfile.mkdtemp(prefix="control-plane-"))
        self._lock = threading.Lock()
        self._argv: dict[str, list[str]] = {}
        self._pids: dict[str, int] = {}
        self._port = self._reserve_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.tokens = {user: secrets.token_hex(16) for user in USERS}
        self._ssl: ssl.SSLContext | None = None
        self._guard = subprocess.Popen(
            [sys.executable, "-I", str(GUARD), str(self.dir), *(["--keep"] if self.keep else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the test's to handle
        )
        try:
            self._bring_up()
        except BaseException:
            self.stop()
            raise
        self.started_in = time.monotonic() - begun

    def stop(self) -> None:
        """Kills every program, waits for that, removes the folder."""
        assert self._guard.stdin
        assert self._guard.stdout
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.stdout.close()
        self._guard.wait()
        self._reserved.close()
        if not self.keep:
            shutil.rmtree(self.dir, ignore_errors=True)  # the guard's work, unless it was killed

    def spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Starts a program that dies with the control plane; its output goes to <name>.log. Returns its pid."""
        self._argv[name] = list(argv)
        self._pids[name] = self._tell({"start": name, "argv": list(argv), "env": {"GOGC": GARBAGE_PERCENT, **(env or {})}})["pid"]
        return self._pids[name]

    def spawn_kubelet(self, *args: str) -> int:
        """Starts the simulated kubelet, which plays every node that carries its label (`kubelet.node_manifest`)."""
        return self.spawn("kubelet", [sys.executable, str(KUBELET), "--kubeconfig", str(self.kubeconfig("kubelet")), *args])

    def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        """Sends a signal (SIGSTOP and SIGCONT too) to one program and, where it ends it, waits for that."""
        self._tell({"signal": name, "number": int(sig), "wait": sig not in (signal.SIGSTOP, signal.SIGCONT)})

    def restart(self, name: str) -> None:
        """Starts a killed program again, and waits until the apiserver answers."""
        self.spawn(name, self._argv[name])
        self._wait_up("the apiserver to be ready", lambda: self._answers("/readyz"))

    def usage(self) -> dict[str, Usage]:
        """CPU and memory per program."""
        tick, page, found = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE"), {}
        for name, pid in self._pids.items():
            with contextlib.suppress(FileNotFoundError):
                stat = _stat(pid)
                found[name] = Usage((int(stat[11]) + int(stat[12])) / tick, int(stat[21]) * page / 2**20)
        return found

    def pids(self) -> dict[str, int]:
        """The process ids by program, the guard's among them."""
        return {**self._pids, "guard": self._guard.pid}

    def log(self, name: str) -> str:
        """All that a program has printed."""
        return (self.dir / f"{name}.log").read_text(errors="replace")

    # Access -----------------------------------------------------------------------------------------------------------

    @property
    def ca(self) -> Path:
        """The certificate to trust; it is the server's own, and good for 127.0.0.1."""
        return self.dir / "certs" / "apiserver.crt"

    @property
    def key(self) -> Path:
        """The key of that certificate, for a server that stands in front of this one."""
        return self.dir / "certs" / "apiserver.key"

    def kubeconfig(self, user: str = "admin", token: str | None = None, *, server: str | None = None) -> Path:
        """A kubeconfig file for one of USERS, or for any name with the given token; `server` may name a proxy."""
        server = server or self.url
        path = self.dir / f"{user.replace(':', '-').replace('/', '-')}-{server.rpartition(':')[2]}.kubeconfig"
        cluster = {"server": server, "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token or self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        }
        path.write_text(json.dumps(config))
        return path

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> Response:
        """One HTTP request, as admin unless a token is given. Raises OSError only where there is no answer at all."""
        link = self._connect(timeout)
        try:
            sent = {"Authorization": f"Bearer {token or self.tokens['admin']}", "Accept": "application/json"}
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            if data is not None:
                sent["Content-Type"] = content_type
            link.request(method, path, data, {**sent, **(headers or {})})
            answer = link.getresponse()
            text = answer.read().decode()
            parsed: Any = text
            with contextlib.suppress(ValueError):  # a watch is many JSON documents, and stays text
                parsed = json.loads(text)
            return Response(answer.status, {k.lower(): v for k, v in answer.getheaders()}, parsed)
        finally:
            link.close()

    def get(self, path: str, *, token: str | None = None) -> Any:
        """The object or list at a path. Raises UnexpectedAnswerError unless it is there."""
        return self._expect("GET", path, None, (200,), token=token)

    def exists(self, path: str) -> bool:
        """Whether a GET finds something. Raises UnexpectedAnswerError for any answer but 200 and 404."""
        answer = self.request("GET", path)
        if answer.status not in (200, 404):
            raise UnexpectedAnswerError("GET", path, answer)
        return answer.status == 200

    def create(self, path: str, body: Mapping[str, Any], *, token: str | None = None) -> Any:
        """Posts an object to a collection (or a subresource such as an eviction) and gives the answer."""
        return self._expect("POST", path, body, (200, 201), token=token)

    def patch(self, path: str, body: Any, *, kind: str = MERGE, token: str | None = None) -> Any:
        """Patches an object, by JSON merge unless another kind is given."""
        return self._expect("PATCH", path, body, (200,), token=token, content_type=kind)

    def apply(self, path: str, body: Mapping[str, Any], *, manager: str = "tests") -> Any:
        """Makes the object at its own path as given, whether it exists or not (server-side apply, forced)."""
        query = f"{path}?fieldManager={manager}&force=true"
        return self._expect("PATCH", query, body, (200, 201), content_type=APPLY)

    def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        """Deletes an object or a collection; what is gone already is no error."""
        return self._expect("DELETE", path, options, (200, 202, 404))

    def wait_for(self, probe: Callable[[], Any], what: str, timeout: float = 20.0, every: float = 0.01) -> Any:
        """Asks until the answer is true, and gives that answer.

        Raises:
            AssertionError: when the time is over.
        """
        deadline = time.monotonic() + timeout
        while not (found := probe()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout} s for {what}")
            time.sleep(every)
        return found

    def record(self, path: str, query: str = "", *, token: str | None = None) -> Recorder:
        """A recorder of a collection's events, to be used with `with`."""
        return Recorder(lambda: self._connect(600.0), token or self.tokens["admin"], path, query)

    def service_account_token(
        self,
        namespace: str,
        name: str,
        *,
        pod: Mapping[str, Any] | None = None,
        seconds: int = 3600,
        audiences: Sequence[str] = (),
    ) -> str:
        """A token as a pod gets it, by TokenRequest.

        Bound to `pod` (an object as the API gives it) when given: for a pod with a nodeName the token then says
        which node, and policies see it as request.userInfo.extra["authentication.kubernetes.io/node-name"].
        """
        spec: dict[str, Any] = {"expirationSeconds": seconds, "audiences": list(audiences)}
        if pod is not None:
            meta = pod["metadata"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        wish = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", wish)
        return str(answer["status"]["token"])

    # Audit ------------------------------------------------------------------------------------------------------------

    def audit_mark(self) -> int:
        """The end of the audit log now, for `since`. An event is in the log before its answer is sent."""
        path = self.dir / "audit.log"
        return path.stat().st_size if path.exists() else 0

    def audit(self, since: int = 0, user: str | None = None) -> Iterator[Object]:
        """One event per request, watches included, oldest first."""
        seen = set()
        with (self.dir / "audit.log").open("rb") as log:
            log.seek(since)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                event = json.loads(line)
                if event["auditID"] in seen or (user is not None and event.get("user", {}).get("username", "") != user):
                    continue  # a watch has two events: ResponseStarted, and ResponseComplete when it ends
                seen.add(event["auditID"])
                yield event

    def audit_counts(self, since: int = 0, user: str | None = None) -> collections.Counter[tuple[str, str, str, int]]:
        """Requests by (user, verb, resource or resource/subresource, HTTP status)."""
        counts: collections.Counter[tuple[str, str, str, int]] = collections.Counter()
        for event in self.audit(since, user):
            ref = event.get("objectRef") or {}
            what = "/".join(filter(None, (ref.get("resource"), ref.get("subresource"))))
            what = what or event["requestURI"].partition("?")[0]
            counts[event.get("user", {}).get("username", ""), event["verb"], what, event.get("responseStatus", {}).get("code", 0)] += 1
        return counts

    # Inside -----------------------------------------------------------------------------------------------------------

    def _bring_up(self) -> None:
        self._write_files()
        for name in ("etcd", "kube-apiserver"):
            self.spawn(name, self._command(name))
        self._wait_up("the apiserver to be ready", lambda: self._answers("/readyz"))
        for crd in self.crds:
            self._add_crd(crd)
        for name in ("kube-controller-manager", "kube-scheduler"):
            if name in self.components:
                self.spawn(name, self._command(name))
        if "kube-controller-manager" in self.components:
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._wait_up("the default service account", lambda: self._answers(account))

    def _reserve_port(self) -> int:
        """Holds a port for the instance's life: bound, never listening, shared with the apiserver by SO_REUSEPORT."""
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        return int(self._reserved.getsockname()[1])

    def _write_files(self) -> None:
        for what in ("ecparam -name prime256v1 -genkey -noout -out sa.key", "ec -in sa.key -pubout -out sa.pub"):
            subprocess.run(["openssl", *what.split()], check=True, cwd=self.dir, stderr=subprocess.DEVNULL, timeout=30)
        (self.dir / "audit.yaml").write_text(components.AUDIT_POLICY)
        lines = (f"{self.tokens[user]},{user},{user}{f',{groups}' if groups else ''}\n" for user, groups in USERS.items())
        (self.dir / "tokens.csv").write_text("".join(lines))

    def _command(self, name: str) -> list[str]:
        match name:
            case "etcd":
                args = components.etcd(self.dir)
            case "kube-apiserver":
                args = components.apiserver(self.dir, self._port, self.options)
            case "kube-controller-manager":
                user = self.kubeconfig("system:kube-controller-manager")
                args = components.controller_manager(self.dir, user, self.ca, self.options)
            case "kube-scheduler":
                args = components.scheduler(self.dir, self.kubeconfig("system:kube-scheduler"), self.options)
            case _:
                raise ValueError(name)
        return [str(self._programs[name]), *args]

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._guard.stdin
        assert self._guard.stdout
        with self._lock:
            try:
                self._guard.stdin.write(json.dumps(message).encode() + b"\n")
                self._guard.stdin.flush()
            except BrokenPipeError:
                raise ControlPlaneError("the guard process died") from None
            line = self._guard.stdout.readline()
        if not line:
            raise ControlPlaneError("the guard process died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ControlPlaneError(answer["error"])
        return answer

    def _wait_up(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.start_timeout
        while not is_so():
            for name, pid in self._pids.items():
                if _stat(pid)[0] == "Z":
                    last_words = self.log(name)[-3000:]
                    raise ControlPlaneError(f"{name} died while waiting for {what}; its last words:\n{last_words}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self._pids)
                raise ControlPlaneError(f"waited {self.start_timeout:.0f} s for {what}\n{logs}")
            time.sleep(0.02)

    def _add_crd(self, crd: Mapping[str, Any]) -> None:
        self.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        spec = crd["spec"]
        version = next(v["name"] for v in spec["versions"] if v["served"])
        path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
        self._wait_up(f"the CRD {crd['metadata']['name']}", lambda: self._answers(path))

    def _expect(self, method: str, path: str, body: Any, wanted: Sequence[int], **more: Any) -> Any:
        answer = self.request(method, path, body, **more)
        if answer.status not in wanted:
            raise UnexpectedAnswerError(method, path, answer)
        return answer.body

    def _answers(self, path: str) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.request("GET", path, timeout=5).status == 200
        return False

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        if self._ssl is None:
            self._ssl = ssl.create_default_context(cafile=str(self.ca))
        return http.client.HTTPSConnection("127.0.0.1", self._port, context=self._ssl, timeout=timeout)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name: state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":  # for a person: up until Ctrl-C
    with ControlPlane() as up:
        up.spawn_kubelet("--nodes", "3")
        print(f"ready in {up.started_in:.1f} s\nexport KUBECONFIG={up.kubeconfig()}\nlogs: {up.dir}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
