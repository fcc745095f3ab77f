"""The state machine for people: a diagram and tables, made from the tables that the program itself uses.

`scripts/draw-states` puts them into docs/upgrade-states.md, and a test compares.
"""

import ast
import inspect
from collections.abc import Mapping
from enum import StrEnum

from driver_manager.config import duration_words
from driver_manager.core import rollout_states
from driver_manager.core.rollout_states import TRANSITIONS, Because, State
from driver_manager.core.situation import RolloutSettings


def exits(settings: RolloutSettings) -> Mapping[State, tuple[str, str]]:
    """State -> what ends it, and within which time, under these settings."""
    again = f"else back to wait, {f'{settings.attempts} times' if settings.attempts else 'any number of times'}"
    return {
        State.UNKNOWN: ("a policy, and a driver pod", "nothing is done to the node"),
        State.DONE: ("a new template, a request, an init container that waits for a safe load", "nothing is done to the node"),
        State.REQUIRED: (
            "its turn; a driver that is the wanted one after all; the policy goes (with our cordon on and no driver: `upgrade-failed`)",
            "nothing is done to the node; the reason says what it waits for",
        ),
        State.CORDON: ("at once", "none needed"),
        State.WAIT_FOR_JOBS: ("the pods are gone, or the time is over", "`waitForCompletion.timeoutSeconds`; 0 is no bound, in words"),
        State.POD_DELETION: (
            f"the node is free; else a drain where the policy has it, {again}",
            "`podDeletion.timeoutSeconds`; 0 is no bound, in words",
        ),
        State.DRAIN: (f"the node is free; {again}", "`drain.timeoutSeconds`; 0 is no bound, in words"),
        State.MAINTENANCE: (
            "the maintenance operator is ready; its object or its kind is gone: back to wait",
            "none, in words: the operator's, or a person deletes the object",
        ),
        State.AFTER_MAINTENANCE: ("at once", "none needed"),
        State.POD_RESTART: (
            "the new driver is ready; it fails; the old one cannot be deleted: back to wait",
            f"{duration_words(settings.driver_timeout)} from the deletion, anew with each template",
        ),
        State.VALIDATION: (
            "all is well, or a person accepts it; the time is over; the driver is outdated again",
            duration_words(settings.validation_timeout),
        ),
        State.UNCORDON: ("at once, after a maintenance operator's object is given back", "none needed"),
        State.FAILED: (
            "a new template, a request, a driver that becomes healthy, a person's acceptance",
            "a person's: the sentence says why and what helps",
        ),
    }


def sentences(kind: type[StrEnum]) -> dict[str, str]:
    """Value -> the sentence below it in the source."""
    tree = ast.parse(inspect.getsource(rollout_states))
    body = next(each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind.__name__)
    found: dict[str, str] = {}
    last = ""
    for each in body:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
            last = str(each.value.value)
            found[last] = ""
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and last in found:
            found[last] = " ".join(str(each.value.value).split())
    return found


def diagram() -> str:
    """The states and their transitions, for Mermaid: https://mermaid.js.org/syntax/stateDiagram.html."""
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{_shown(state)}" as {state.name}' for state in State]
    lines += ["    [*] --> UNKNOWN"]
    lines += [f"    {before.name} --> {after.name}" for before in State for after in State if after in TRANSITIONS[before]]
    return "\n".join(lines)


def state_table() -> str:
    """A row for each state, with the times that hold where nobody sets others."""
    meanings, ends = sentences(State), exits(RolloutSettings())
    rows = [f"| `{_shown(state)}` | {meanings[state.value]} | {' | '.join(ends[state])} |" for state in State]
    return "\n".join(["| state | meaning | what ends it | within |", "| --- | --- | --- | --- |", *rows])


def reason_table() -> str:
    """A row for each reason."""
    rows = [f"| `{reason}` | {sentence} |" for reason, sentence in sentences(Because).items()]
    return "\n".join(["| reason | what is so |", "| --- | --- |", *rows])


def drawn() -> str:
    """All of it, as it stands between the markers of the page."""
    return f"```mermaid\n{diagram()}\n```\n\n{state_table()}\n\n### Reasons\n\n{reason_table()}\n"


def _shown(state: State) -> str:
    return state.value or "no label"
