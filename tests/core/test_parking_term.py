"""Parking by a DaemonSet's own template: the term goes in beside what is there, and out again without a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.fleet import FleetSet
from driver_manager.core.parking import means_for
from driver_manager.core.parking_term import EXPRESSION, leaves_parked_nodes, put_in, taken_out
from driver_manager.core.snapshot import LabelExpression, NodeView
from driver_manager.kube import fleetviews
from driver_manager.names import PARK, PARKED
from tests.core.test_parking import parked

ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
TERM = {"key": PARKED, "operator": "DoesNotExist"}
FIELDS = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
BARE = NodeView(name="n", uid="u", resource_version="1")
SET = FleetSet(namespace="mon", name="exporter", uid="u", labels={PARK: "true"})


def merged(there: Any, patch: Any) -> Any:
    """A merge patch, as RFC 7386 has it."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            kept.pop(key, None)
        else:
            kept[key] = merged(kept.get(key), value)
    return kept


def with_affinity(affinity: dict[str, Any] | None) -> FleetSet:
    """A DaemonSet with such a template, as the adapter reads it."""
    spec = {"template": {"metadata": {}, "spec": {"affinity": affinity} if affinity is not None else {}}}
    body = {"metadata": {"namespace": "mon", "name": "x", "uid": "u", "resourceVersion": "1"}, "spec": spec}
    return fleetviews.SETS.one(msgspec.json.encode(body))


full_terms = st.sampled_from([{"matchExpressions": [ZONE]}, FIELDS, {**FIELDS, "matchExpressions": [ZONE]}])
required = st.lists(full_terms, min_size=1, max_size=3).map(
    lambda terms: {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
)
preferred = st.just({"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": [ZONE]}}]})
node_affinities = st.one_of(required, preferred, st.tuples(required, preferred).map(lambda two: {**two[0], **two[1]}))
affinities = st.one_of(
    st.none(),
    node_affinities.map(lambda found: {"nodeAffinity": found}),
    node_affinities.map(lambda found: {"nodeAffinity": found, "podAntiAffinity": {"x": 1}}),
    st.just({"podAntiAffinity": {"x": 1}}),
)


@given(affinities)
def test_in_and_out_again(before: dict[str, Any] | None) -> None:
    """With it the DaemonSet leaves parked nodes and no other; a second time changes nothing; out again all is as before."""
    inside = merged(before, put_in(before))
    was, now = with_affinity(before), with_affinity(inside)
    assert leaves_parked_nodes(now)
    assert merged(inside, put_in(inside)) == inside
    for labels in ({}, {"zone": "a"}, {"zone": "b"}):
        assert not now.fits({**labels, PARKED: "true"})
        assert now.fits(labels) is was.fits(labels)
    out = taken_out(inside)
    assert (merged(inside, out) if out is not None else None) == before


def test_an_empty_term_stays_empty() -> None:
    """It matches no node: with an expression in it, it would."""
    before = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}, {"matchExpressions": [ZONE]}]}}}
    (node,) = put_in(before).values()
    (required,) = node.values()
    assert required["nodeSelectorTerms"] == [{}, {"matchExpressions": [ZONE, TERM]}]
    assert leaves_parked_nodes(with_affinity(merged(before, put_in(before))))
    assert not with_affinity(before).fits({"zone": "b"})


ZONED = LabelExpression("zone", "Exists")


@pytest.mark.parametrize(
    ("affinity", "is_settled", "leaves"),
    [
        ((), True, False),
        (((EXPRESSION,),), True, True),
        (((EXPRESSION,),), False, False),
        (((ZONED, EXPRESSION), (EXPRESSION,)), True, True),
        (((ZONED,), (EXPRESSION,)), True, False),
        (((LabelExpression(PARKED, "Exists"),),), True, False),
    ],
)
def test_what_counts(affinity: tuple[tuple[LabelExpression, ...], ...], is_settled: bool, leaves: bool) -> None:
    """The term has to be in every alternative, and the DaemonSet's controller has to have seen it."""
    assert leaves_parked_nodes(replace(SET, affinity=affinity, is_settled=is_settled)) is leaves


@pytest.mark.parametrize(
    ("changes", "unchanged", "said"),
    [
        ({}, {}, "no policy"),
        ({}, {"mon/exporter": "is being changed"}, "is being changed"),
        ({"affinity": ((EXPRESSION,),)}, {}, ""),
        ({"affinity": ((EXPRESSION,),), "is_rolling": True}, {}, "rolling update"),
    ],
)
def test_without_a_policy(changes: dict[str, Any], unchanged: dict[str, str], said: str) -> None:
    """A template with the term is as good as a policy, as soon as its roll-out has ended; of any other the reason is told."""
    asked = replace(SET, **changes)
    means = means_for(BARE, opted_in=[asked], operator_sets=[], own_namespace="dm", why_not="no policy", is_full=False, unchanged=unchanged)
    assert (asked.ref in means.parkable) is not bool(said)
    assert said in means.not_now.get(asked.ref, "")
    again = means_for(parked(BARE), opted_in=[asked], operator_sets=[], own_namespace="dm", why_not="no policy", is_full=False)
    assert asked.ref in again.parkable
