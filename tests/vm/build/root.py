"""Makes the guest's root folder: the Python that runs this, a virtual environment with the given one's packages, busybox and kmod.

usage: root.py ENVIRONMENT BUSYBOX FOLDER

The interpreter keeps its path, so both Debian's and one of pyenv work; the packages lie in /opt/venv, which `tests/vm/layer.py` installs
the project into at boot. Nothing is downloaded here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDERS = (
    "proc",
    "sys",
    "dev",
    "run",
    "tmp",
    "root",
    "etc",
    "modules",
    "var",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib64",
    "opt/venv/bin",
)
NOT_NEEDED = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "pydoc_data", "site-packages", "dist-packages"}
"""Parts of the standard library."""
APPLETS = ("sh", "mount", "umount", "ls", "cat", "dmesg", "sleep", "ip", "mknod", "chroot", "nsenter", "ps")
_BATCH = 50


def copy_python(root: Path) -> Path:
    """Copies interpreter and standard library to where they are here; gives the interpreter's path."""
    library = Path(sysconfig.get_path("stdlib"))

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if (Path(folder) == library and name in NOT_NEEDED)
            or name.startswith(("config-", "_tkinter", "_test"))
            or name.endswith((".a", ".opt-1.pyc", ".opt-2.pyc"))
        ]

    shutil.copytree(library, below(root, library), ignore=left_out, symlinks=True)
    program = Path(sys.executable).resolve()
    below(root, program).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, below(root, program))
    return program


def copy_packages(environment: Path, root: Path, program: Path) -> None:
    """Makes /opt/venv with the packages of an environment, less pip and its kin."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    venv = root / "opt/venv"
    (venv / "bin/python3").symlink_to(program)
    (venv / "pyvenv.cfg").write_text(f"home = {program.parent}\ninclude-system-site-packages = false\n")
    shutil.copytree(
        environment / "lib" / version / "site-packages",
        venv / "lib" / version / "site-packages",
        ignore=shutil.ignore_patterns(
            "pip", "pip-*", "setuptools", "setuptools-*", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"
        ),
    )


def copy_tools(busybox: Path, root: Path) -> None:
    """The small programs, and the real kmod for its messages and exit codes."""
    shutil.copy2(busybox, root / "usr/bin/busybox")
    for name in APPLETS:
        (root / "usr/bin" / name).symlink_to("busybox")
    kmod = Path("/bin/kmod").resolve()
    shutil.copy2(kmod, root / "usr/bin/kmod")
    for name in ("rmmod", "insmod", "lsmod", "modprobe", "modinfo"):
        (root / "usr/sbin" / name).symlink_to("../bin/kmod")


def libraries_of(files: Sequence[Path]) -> Iterator[Path]:
    """The shared libraries that programs and libraries need, as the loader finds them here."""
    for start in range(0, len(files), _BATCH):
        said = subprocess.run(["ldd", *files[start : start + _BATCH]], capture_output=True, text=True, check=False).stdout
        for path in re.findall(r"(?:=> )?(/\S+) \(0x", said):
            yield Path(path)
            opened_by_name = Path(path).with_name("libgcc_s.so.1")
            if opened_by_name.exists():
                yield opened_by_name


def below(root: Path, path: Path) -> Path:
    """Where a path of this machine lies in the guest's root."""
    return root / path.relative_to("/")


def make(environment: Path, busybox: Path, root: Path) -> None:
    """Makes the whole root."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):  # merged, as Debian's is
        (root / name).symlink_to(f"usr/{name}")
    (root / "var/run").symlink_to("../run")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    program = copy_python(root)
    copy_packages(environment, root, program)
    copy_tools(busybox, root)
    binaries = [below(root, program), root / "usr/bin/kmod", *(path for path in root.rglob("*.so*") if path.is_file())]
    for library in set(libraries_of(binaries)):
        target = below(root, library)
        if not library.is_relative_to(root) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), target)
    for file in (*binaries, *root.glob("usr/lib*/**/*.so*")):  # some are scripts of the linker or stripped already
        subprocess.run(["strip", "--strip-unneeded", file], capture_output=True, check=False)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
