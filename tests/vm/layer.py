"""What of this project goes into the guest: the wheel, installed as a user would install it, and these tests. Made anew for each boot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.vm.build import cpio

ROOT = Path(__file__).parents[2]
GUEST_PYTHON = "/opt/venv/bin/python3"


def project_layer(folder: Path) -> Path:
    """Builds the wheel, installs it below `folder` and gives an archive of it."""
    tree = folder / "layer"
    venv = tree / "opt/venv"
    _run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "wheel"))
    (wheel,) = (folder / "wheel").glob("*.whl")
    packages = venv / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    # The dependencies are in the guest's root already, as the lock file names them.
    _run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", str(packages), str(wheel))
    shutil.move(packages / "bin", venv / "bin")
    for script in (venv / "bin").iterdir():
        _, _, rest = script.read_text().partition("\n")
        script.write_text(f"#!{GUEST_PYTHON}\n{rest}")
    tests = tree / "opt/tests/tests"
    shutil.copytree(
        ROOT / "tests/vm", tests / "vm", ignore=shutil.ignore_patterns("modules", "build", "conftest.py", "boot.py", "__pycache__")
    )
    shutil.copy(ROOT / "tests/__init__.py", tests)
    (tree / "init").write_bytes((ROOT / "tests/vm/init.py").read_bytes())
    (tree / "init").chmod(0o755)
    archive = folder / "project.cpio"
    cpio.pack(tree, archive)
    return archive


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}")
