"""Where the programs of the control plane are, and which version they have to be.

The facts the tests rest on were seen on one version, so a program from KUBEBUILDER_ASSETS or the PATH is taken only
where it says that it is that very version. `scripts/build-control-plane` looks in the same places in the same order,
and builds what is in none of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
GO_MOD = Path(__file__).parent / "build" / "go.mod"
BUILD_COMMAND = "scripts/build-control-plane"


class ProgramsMissingError(RuntimeError):
    """Programs of the control plane are in none of the places looked at."""


def pinned_versions() -> dict[str, str]:
    """What `--version` says of each program, in the first line that names a version."""
    text = GO_MOD.read_text()
    kubernetes = re.search(r"^\s*k8s\.io/kubernetes (v[\d.]+)", text, re.MULTILINE)
    etcd = re.search(r"^\s*go\.etcd\.io/etcd/server/v3 v([\d.]+)", text, re.MULTILINE)
    if kubernetes is None or etcd is None:
        raise ProgramsMissingError(f"{GO_MOD} names no version of Kubernetes and etcd")
    return {name: f"etcd Version: {etcd[1]}" if name == "etcd" else f"Kubernetes {kubernetes[1]}" for name in COMPONENTS}


def cache_folder() -> Path:
    """Where the build script puts what it builds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = pinned_versions()["kube-apiserver"].removeprefix("Kubernetes ")
    return cache / "driver-manager" / f"k8s-{version}"


def find_programs() -> dict[str, Path]:
    """The path of each program: KUBEBUILDER_ASSETS, else PATH, else the cache folder.

    Raises:
        ProgramsMissingError: with the names of those that are nowhere, and the command that builds them.
    """
    assets, cache = os.environ.get("KUBEBUILDER_ASSETS"), cache_folder()
    found: dict[str, Path] = {}
    for name, version in pinned_versions().items():
        for path in (Path(assets, name) if assets else None, _on_path(name)):
            if path is not None and _says(path, version):
                found[name] = path
                break
        else:
            if os.access(cache / name, os.X_OK):  # the folder's name is the version
                found[name] = cache / name
    if missing := [name for name in COMPONENTS if name not in found]:
        raise ProgramsMissingError(f"{', '.join(missing)} not found; build with {BUILD_COMMAND} (into {cache})")
    return found


def _on_path(name: str) -> Path | None:
    path = shutil.which(name)
    return Path(path) if path else None


def _says(path: Path, version: str) -> bool:
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return version in shown.splitlines()
