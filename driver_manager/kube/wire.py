"""What all kinds have in common on the wire, and how lists and watches of any kind are read.

Answers are decoded straight from their bytes into small Structs that hold only what is read. A slice or map that Go may
write as null is `| None` here.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from driver_manager.core.snapshot import LabelExpression, Owner, Toleration

View = TypeVar("View")


class Wire(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What all structs on the wire share: camelCase names, and unknown fields are passed over."""


class OwnerReference(Wire, frozen=True):
    """A reference to an owner."""

    kind: str
    name: str
    uid: str
    controller: bool | None = None


class Meta(Wire, frozen=True):
    """The metadata of an object."""

    name: str
    uid: str
    namespace: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] | None = None


class WireObject(Wire, frozen=True):
    """An object of any kind."""

    metadata: Meta


Object = TypeVar("Object", bound=WireObject)


class WireToleration(Wire, frozen=True):
    """A toleration of a pod or a template."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class Requirement(Wire, frozen=True):
    """An expression of a node selector's term."""

    key: str
    operator: str = ""
    values: list[str] | None = None


class SelectorTerm(Wire, frozen=True):
    """A term of a node selector."""

    match_expressions: list[Requirement] | None = None
    match_fields: list[Requirement] | None = None


class NodeSelector(Wire, frozen=True):
    """Terms, of which one has to match."""

    node_selector_terms: list[SelectorTerm] | None = None


class NodeAffinity(Wire, frozen=True):
    """Node affinity; what is only preferred is not read."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Wire, frozen=True):
    """Affinity of a pod or a template."""

    node_affinity: NodeAffinity | None = None

    def terms(self) -> list[SelectorTerm]:
        """The terms of the required node affinity."""
        required = self.node_affinity and self.node_affinity.required_during_scheduling_ignored_during_execution
        return (required.node_selector_terms if required else None) or []


class Strategy(Wire, frozen=True):
    """How a DaemonSet replaces its pods."""

    type: str = ""


class SetStatus(Wire, frozen=True):
    """The status of a DaemonSet. Numbers that are 0 are left out."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    updated_number_scheduled: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether pods of older templates are there. One of the newest counts as updated, whether it runs or is gated."""
        return self.updated_number_scheduled < self.current_number_scheduled


class Gate(Wire, frozen=True):
    """A scheduling gate of a pod."""

    name: str


class _ListMeta(Wire, frozen=True):
    resource_version: str
    token: str | None = msgspec.field(name="continue", default=None)


class _List(Wire, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None


class _BookmarkMeta(Wire, frozen=True):
    resource_version: str


class _Bookmark(Wire, frozen=True):
    metadata: _BookmarkMeta


class _Event(Wire, frozen=True):
    type: str
    object: msgspec.Raw


_list = msgspec.json.Decoder(_List)
_event = msgspec.json.Decoder(_Event)
_bookmark = msgspec.json.Decoder(_Bookmark)


class Page(msgspec.Struct, Generic[View], frozen=True):
    """One page of a list."""

    items: tuple[View, ...]
    resource_version: str
    token: str
    """Where the next page begins; empty at the end."""


class WatchEvent(msgspec.Struct, Generic[View], frozen=True):
    """One line of a watch: `item` for ADDED, MODIFIED and DELETED, `error` (a Status) for ERROR."""

    type: str
    resource_version: str = ""
    item: View | None = None
    error: bytes = b""


class Reader(Generic[View]):
    """Reads objects of one kind, lists of them and watches of them.

    The methods raise msgspec.MsgspecError or ValueError for bytes that are not that; the caller knows what was asked.
    """

    def __init__(self, wire: type[Object], view: Callable[[Object], View]) -> None:
        decode = msgspec.json.Decoder(wire).decode

        def read(body: bytes | msgspec.Raw) -> tuple[str, View]:
            item = decode(body)
            version = item.metadata.resource_version
            if (
                not version.isdecimal()
            ):  # they are put in order: https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
                raise ValueError(f"its resourceVersion is {version!r}, and that is no number")
            return version, view(item)

        self._read = read

    def one(self, body: bytes) -> View:
        """Reads one object."""
        return self._read(body)[1]

    def page(self, body: bytes) -> Page[View]:
        """Reads a page of a list, object by object: never are all of its Structs there at once."""
        page = _list.decode(body)
        items = tuple(self._read(item)[1] for item in page.items or ())
        return Page(items, page.metadata.resource_version, page.metadata.token or "")

    def event(self, line: bytes) -> WatchEvent[View]:
        """Reads one line of a watch."""
        event = _event.decode(line)
        if event.type == "ERROR":
            return WatchEvent(event.type, error=bytes(event.object))
        if event.type == "BOOKMARK":
            return WatchEvent(event.type, _bookmark.decode(event.object).metadata.resource_version)
        return WatchEvent(event.type, *self._read(event.object))


def shared(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Labels whose texts are stored once for all objects: thousands have the same keys, and mostly the same values."""
    return {sys.intern(key): sys.intern(value) for key, value in (labels or {}).items()}


def controller(references: Iterable[OwnerReference] | None) -> Owner | None:
    """The owner that manages the object; of a mirror pod that is its Node."""
    return next((Owner(each.kind, each.name, each.uid) for each in references or () if each.controller), None)


def tolerations(listed: list[WireToleration] | None) -> tuple[Toleration, ...]:
    """Tolerations as they are written."""
    return tuple(Toleration(each.key, each.operator, each.value, each.effect) for each in listed or ())


def meant_for(affinity: Affinity | None) -> str:
    """The node that the DaemonSet controller made a pod for: it names the node in every term.

    https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/#how-daemon-pods-are-scheduled
    """
    fields = (each for term in (affinity.terms() if affinity else ()) for each in term.match_fields or ())
    return next((each.values[0] for each in fields if each.key == "metadata.name" and each.operator == "In" and each.values), "")


def label_terms(affinity: Affinity | None) -> tuple[tuple[LabelExpression, ...], ...]:
    """The terms of a required node affinity, as far as they speak of labels: a DaemonSet's pod also has one on its node's name.

    An empty term matches no node, and is left out.
    """
    return tuple(
        tuple(LabelExpression(each.key, each.operator, tuple(each.values or ())) for each in term.match_expressions or ())
        for term in (affinity.terms() if affinity else ())
        if term.match_expressions or term.match_fields
    )
