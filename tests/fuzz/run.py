"""Coverage-guided fuzzing of one parser, by atheris: `scripts/fuzz` starts this in an environment of its own.

    python -m tests.fuzz.run NAME CORPUS_FOLDER [libFuzzer's own arguments...]

libFuzzer's figures go to standard error: executions, coverage, corpus. What fails is printed as Python bytes, with the line that makes it a
test for good, and the program ends with 77.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(name: str, corpus: Path, arguments: list[str]) -> None:
    """Fuzzes until libFuzzer ends the process."""
    import atheris

    atheris.enabled_hooks.add("str")  # what a prefix is compared with is a branch too; its hook for patterns knows none of bytes
    # With the properties: their slow readings have a branch for each thing that a pattern holds in one.
    places = [f"driver_manager.{name}" for name in ("host.parsing", "host.scan", "core.modalias", "core.vfio")] + ["tests.fuzz"]
    with atheris.instrument_imports(include=places):
        kernel_text = importlib.import_module("tests.fuzz.kernel_text")
    check = kernel_text.PROPERTIES[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(kernel_text.SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(text.encode(errors="surrogateescape"))

    def once(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        try:
            check(text)
        except BaseException:
            print(f"\nfuzz: {name} fails on {data!r}", file=sys.stderr)
            print(f"fuzz: keep it as a seed of {name!r} in tests/fuzz/kernel_text.py, or above its test:", file=sys.stderr)
            print(f"    @example({text!r})", file=sys.stderr)
            raise

    atheris.Setup([sys.argv[0], str(corpus), *arguments], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
