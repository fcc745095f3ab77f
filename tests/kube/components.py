"""The command lines of the control plane's programs, with the reason for each flag that is not plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

USERS = {
    "admin": "system:masters",
    "kubelet": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}
"""User name and groups of each static token."""

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, nonResourceURLs: ["/readyz*", "/healthz*", "/livez*", "/version"]}
- {level: None, users: [kubelet], resources: [{group: coordination.k8s.io}]}
- {level: Metadata}
"""
SCHEDULER_CONFIG = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: "%s", qps: 1000, burst: 2000}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a test may ask of its control plane."""

    runtime_config: Sequence[str] = ()
    """Group versions off by default, e.g. ("resource.k8s.io/v1beta2=true",)."""
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    """Gates for apiserver, controller manager and scheduler alike."""
    apiserver_args: Sequence[str] = ()
    controller_manager_args: Sequence[str] = ()
    node_grace_seconds: int = 50
    """Silence after which a node turns NotReady. Raise it where the simulated kubelet renews rarely."""

    @property
    def gates(self) -> list[str]:
        """The --feature-gates flag, or nothing."""
        if not self.feature_gates:
            return []
        return [f"--feature-gates={','.join(f'{gate}={str(on).lower()}' for gate, on in self.feature_gates.items())}"]


def etcd(folder: Path) -> list[str]:
    """Etcd on unix sockets: no ports to be short of."""
    client, peer = f"unix://{folder}/etcd.sock", f"unix://{folder}/peer.sock"
    return [
        "--name=test",
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=test={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(folder: Path, port: int, options: Options) -> list[str]:
    """The apiserver on one port of 127.0.0.1, with an audit log that is written before each answer is sent."""
    return [
        f"--etcd-servers=unix://{folder}/etcd.sock",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        "--permit-port-sharing",  # the port is reserved by a bound socket of ours
        f"--cert-dir={folder}/certs",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder}/tokens.csv",
        f"--service-account-key-file={folder}/sa.pub",
        f"--service-account-signing-key-file={folder}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--audit-log-path={folder}/audit.log",
        f"--audit-policy-file={folder}/audit.yaml",
        "--audit-log-mode=blocking",
        *([f"--runtime-config={','.join(options.runtime_config)}"] if options.runtime_config else []),
        *options.gates,
        *options.apiserver_args,
    ]


def controller_manager(folder: Path, kubeconfig: Path, ca: Path, options: Options) -> list[str]:
    """The controllers, each with a user of its own."""
    return [
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        "--use-service-account-credentials",  # one user per controller in the audit log, with its real RBAC
        f"--service-account-private-key-file={folder}/sa.key",
        f"--root-ca-file={ca}",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",  # the default, 20 a second, paces 1,000 DaemonSet pods to 50 s
        f"--node-monitor-grace-period={options.node_grace_seconds}s",
        "--node-monitor-period=1s",
        *options.gates,
        *options.controller_manager_args,
    ]


def scheduler(folder: Path, kubeconfig: Path, options: Options) -> list[str]:
    """The scheduler, by a config file: only there its request rate can be raised."""
    config = folder / "scheduler.yaml"
    config.write_text(SCHEDULER_CONFIG % kubeconfig)
    return [f"--config={config}", "--secure-port=0", *options.gates]
