"""The parts of the documents that are made from the program, so that no hand has to keep them.

`scripts/docs` writes them, `test_documents.py` compares them. A part stands between two comments in its document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from driver_manager.cli import vfio
from driver_manager.cli.demo import plain_story
from driver_manager.cli.help import settings_table
from driver_manager.config import effective_settings
from driver_manager.fleetconfig import CONTROLLER_OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def vfio_table() -> list[str]:
    """The flags of `vfio-manage`, those of both commands once."""
    lines = ["| flag | variable | default | of | what it does |", "| --- | --- | --- | --- | --- |"]
    commands = vfio.cli.commands
    options = {name: {each.opts[-1]: each for each in command.params} for name, command in commands.items()}
    for flag in dict.fromkeys(flag for each in options.values() for flag in each):
        of = [name for name, each in options.items() if flag in each]
        option = options[of[0]][flag]
        assert isinstance(option, click.Option)
        words = (option.help or "").partition("  [env")[0]
        default = option.default if isinstance(option.default, str) and option.default else "none"
        variable = f"`{option.envvar}`" if option.envvar else "none"
        lines.append(f"| `{flag}` | {variable} | {default} | {', '.join(of)} | {words} |")
    return lines


def demo() -> list[str]:
    """The whole run that `scripts/demo --plain` shows."""
    _, lines = plain_story(effective_settings({}, {}), 0)
    return ["```text", *lines, "```"]


PARTS: Mapping[tuple[str, str], Callable[[], list[str]]] = {
    ("README.md", "demo"): demo,
    ("docs/settings.md", "settings"): lambda: list(settings_table()),
    ("docs/settings.md", "controller"): lambda: list(settings_table(CONTROLLER_OPTIONS)),
    ("docs/settings.md", "vfio-manage"): vfio_table,
}
"""Document and name of the part -> its lines."""


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: made by scripts/docs -->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)


def made(path: str, text: str) -> str:
    """A document with all its parts made anew."""
    for (document, name), lines in PARTS.items():
        if document == path:
            body = "".join(f"{line}\n" for line in lines())
            text, found = _between(name).subn(lambda match: f"{match[1]}\n{body}\n{match[2]}", text)  # noqa: B023 - called at once
            assert found == 1, f"{path} has {found} parts called {name}"
    return text


def main() -> None:
    """Writes every document that is not as it should be."""
    for path in dict.fromkeys(document for document, _ in PARTS):
        text = (ROOT / path).read_text()
        if (new := made(path, text)) != text:
            (ROOT / path).write_text(new)
            print(f"{path} is made anew", file=sys.stderr)


if __name__ == "__main__":
    main()
