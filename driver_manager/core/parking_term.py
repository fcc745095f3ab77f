"""Parking by a DaemonSet's own template: a term of its node affinity that no parked node meets, so that its controller leaves such nodes.

The DaemonSet controller asks the newest template which nodes it is for, whatever template a pod was made from: with the term in it, the
label of a parked node takes the pod away, and its removal brings one back. Putting the term in is a new template, which rolls a DaemonSet
with the strategy RollingUpdate once. A chart may have the term from the beginning: then nothing of it is ever changed.

The values here are JSON as the API has it. https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#NodeAffinity
"""

from collections.abc import Mapping
from typing import Any, Final

from driver_manager.core.fleet import FleetSet
from driver_manager.core.snapshot import LabelExpression
from driver_manager.names import PARKED

EXPRESSION: Final = LabelExpression(PARKED, "DoesNotExist")
_WRITTEN: Final = {"key": EXPRESSION.key, "operator": EXPRESSION.operator}
_NODE, _REQUIRED, _TERMS, _EXPRESSIONS = (
    *("nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    *("nodeSelectorTerms", "matchExpressions"),
)


def leaves_parked_nodes(daemon_set: FleetSet) -> bool:
    """Whether its template keeps its pods off parked nodes, and its controller has seen that."""
    return daemon_set.is_settled and bool(daemon_set.affinity) and all(EXPRESSION in term for term in daemon_set.affinity)


def put_in(affinity: Mapping[str, Any] | None) -> dict[str, Any]:
    """The change (a merge patch) of a pod template's `affinity` that puts the term in, beside what is there.

    One of the terms has to match, so each gets it; one that is empty matches no node, and stays so.
    """
    terms = _terms(affinity)
    wanted = [_with(term) if term else term for term in terms] if terms else [_with({})]
    return {_NODE: {_REQUIRED: {_TERMS: wanted}}}


def taken_out(affinity: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The change that takes it out again; what held nothing else goes with it. None: all of `affinity` goes."""
    left = [_without(term) for term in _terms(affinity)]
    if any(left):
        return {_NODE: {_REQUIRED: {_TERMS: left}}}
    node = (affinity or {}).get(_NODE) or {}
    if set(node) - {_REQUIRED}:
        return {_NODE: {_REQUIRED: None}}
    return {_NODE: None} if set(affinity or {}) - {_NODE} else None


def _terms(affinity: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    required = ((affinity or {}).get(_NODE) or {}).get(_REQUIRED) or {}
    return list(required.get(_TERMS) or ())


def _with(term: Mapping[str, Any]) -> dict[str, Any]:
    there = term.get(_EXPRESSIONS) or []
    return {**term, _EXPRESSIONS: there if _WRITTEN in there else [*there, _WRITTEN]}


def _without(term: Mapping[str, Any]) -> dict[str, Any]:
    left = [each for each in term.get(_EXPRESSIONS) or [] if each != _WRITTEN]
    others = {key: value for key, value in term.items() if key != _EXPRESSIONS}
    return {**others, _EXPRESSIONS: left} if left else others
