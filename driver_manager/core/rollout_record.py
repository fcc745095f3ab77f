"""The controller's annotation on a node: how far the node is, what has to be put back, and what went wrong before.

JSON. A person may read it and may take it off; a value that does not decode is reported and never acted on. Times are Unix seconds and
absolute, so that no write is needed to keep a wait going over a restart.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from driver_manager.core.hold import MAX_PARKED
from driver_manager.core.labels import is_label_value
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import recorded_policy
from driver_manager.errors import InvariantBroken
from driver_manager.names import ROLLOUT

MAX_BYTES: Final = 48 * 1024
"""Of UTF-8. By the limits below all that a node needs back fits, whatever its names; as a rule it is less than 2 KiB.

The API server takes 256 KiB of annotations:
https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/
"""
MAX_FAILURES: Final = 3
"""How many of the last failures are kept."""
MAX_SENTENCE: Final = 300
MAX_NAME: Final = 253
MAX_KEY: Final = 317
"""Of a label, a taint or a resource: a DNS name, a slash, and 63 characters."""
MAX_TRIES: Final = 1000
MAX_DEVICES: Final = 32
"""Kinds of devices of one node."""
MAX_PAUSED: Final = 32
"""Labels of one node that can be paused."""
TOO_MANY_PAUSED: Final = f"more than {MAX_PAUSED} labels of it would have to be paused"
TOO_MANY_DEVICES: Final = f"it has more than {MAX_DEVICES} kinds of devices, and no more can be recorded"

Short = Annotated[str, Meta(max_length=MAX_NAME)]
Key = Annotated[str, Meta(max_length=MAX_KEY)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
When = Annotated[float, Meta(ge=0, lt=1e12)]


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One try that did not succeed."""

    at: When
    target: Short
    reason: Short
    sentence: Annotated[str, Meta(max_length=MAX_SENTENCE)] = ""
    is_driver_gone: bool = msgspec.field(name="driverGone", default=False)
    """Whether the old driver pod had been deleted already, so that the node stays closed."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """How far a node is."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    node: Short
    """Uid of the node it was written for: on another node it means nothing."""
    state: Short = ""
    """The state that it was written with: where the label says something else, somebody else has moved the node."""
    target: Short = ""
    """Revision of the driver DaemonSet's template that the node is taken to."""
    policy: Short = ""
    """Name of the policy group it was started under."""
    rules: dict[str, Any] = {}
    """That policy as it was then (`written_policy`): it stays in force for this node."""
    is_cordoned: bool = msgspec.field(name="cordoned", default=False)
    """Whether the cordon is ours."""
    devices: Annotated[dict[Key, Count], Meta(max_length=MAX_DEVICES)] = {}
    """Resource -> how many of it the node had before its first cordon for this target."""
    parked: Annotated[list[Key], Meta(max_length=MAX_PARKED)] = []
    """`namespace/name` of the DaemonSets that are parked on the node because of us."""
    paused: Annotated[dict[Key, Short], Meta(max_length=MAX_PAUSED)] = {}
    """Node label that we paused, so that DaemonSets which select it leave -> its value before."""
    taint: Key = ""
    """Key of our taint; its value says that it is ours."""
    attempt: Annotated[int, Meta(ge=0, le=MAX_TRIES)] = 0
    not_before: When = msgspec.field(name="notBefore", default=0.0)
    """No new try earlier than this."""
    since: When = 0.0
    """When the node came to its state."""
    deadline: When = 0.0
    """When the wait of this state ends; 0 is never."""
    reason: Short = ""
    """Why it is where it is, for machines."""
    failures: Annotated[list[Failure], Meta(max_length=MAX_FAILURES)] = []
    done: When = 0.0
    """When the last upgrade ended well; `target` is what it ended with."""

    @property
    def last_failure(self) -> Failure | None:
        """The newest failure for this target."""
        return self.failures[-1] if self.failures and self.failures[-1].target == self.target else None


class BadProgress(ValueError):
    """An annotation that is none of ours, with what is wrong."""


_decoder: Final = msgspec.json.Decoder(Progress)
_encoder: Final = msgspec.json.Encoder(order="sorted")


def encode(progress: Progress) -> str:
    """The annotation's value; the oldest failures go where it would be too long.

    Raises:
        InvariantBroken: it would be too long without them: nothing that a node needs back is ever left out.
    """
    while len(written := _encoder.encode(progress)) > MAX_BYTES:
        if not progress.failures:
            raise InvariantBroken(f"the record of the roll-out would be {len(written)} bytes, more than {MAX_BYTES}")
        progress = msgspec.structs.replace(progress, failures=progress.failures[1:])
    return written.decode()


def decode(text: str) -> Progress:
    """Reads an annotation's value.

    Raises:
        BadProgress: with what is wrong.
    """
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_BYTES:
        raise BadProgress(f"it is {size} bytes long, more than {MAX_BYTES}")
    try:
        progress = _decoder.decode(text)
        recorded_policy(progress.rules)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadProgress(str(error)) from error
    if wrong := [key for key, value in progress.paused.items() if not is_label_value(value)]:
        raise BadProgress(f"what the label {wrong[0]} was before it was paused is no value that a label can have")
    return progress


def progress_of(node: NodeView) -> tuple[Progress | None, str]:
    """The node's record, and what is wrong with it; another node's is none."""
    text = node.annotations.get(ROLLOUT)
    if text is None:
        return None, ""
    try:
        progress = decode(text)
    except BadProgress as error:
        return None, str(error)
    return (progress, "") if progress.node == node.uid else (None, "")
