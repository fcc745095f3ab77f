from __future__ import annotations

import pytest

from driver_manager.core.snapshot import PodView, Taint
from driver_manager.kube import calls
from driver_manager.ports import NodePatch

POD = PodView(namespace="ns", name="p", uid="u")


def test_a_patch_carries_only_what_changes() -> None:
    """An empty patch has an empty body, so that nothing is overwritten by accident."""
    assert calls.patch_node(NodePatch(name="n1")).body == {}


def test_a_patch_is_guarded_and_whole() -> None:
    """Labels, annotations, cordon and taints go in one body with the version they were decided on."""
    old = Taint("k", "", "NoExecute", "2026-01-31T09:00:00Z")
    patch = NodePatch(
        name="n1",
        resource_version="7",
        labels={"a": "b", "c": None},
        annotations={"d": None},
        unschedulable=True,
        taints=(old, Taint("ours", "dm-x")),
    )
    call = calls.patch_node(patch)
    assert call.content_type == "application/merge-patch+json"
    assert call.body == {
        "metadata": {"resourceVersion": "7", "labels": {"a": "b", "c": None}, "annotations": {"d": None}},
        "spec": {
            "unschedulable": True,
            "taints": [
                {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-31T09:00:00Z"},
                {"key": "ours", "value": "dm-x", "effect": "NoSchedule"},
            ],
        },
    }


def test_an_undo_takes_fields_away() -> None:
    """No cordon and no taints are written as null, which is how a node looks that never had any."""
    body = calls.patch_node(NodePatch(name="n1", unschedulable=False, taints=())).body
    assert body == {"spec": {"unschedulable": None, "taints": None}}


def test_an_eviction_names_exactly_one_pod() -> None:
    """The uid goes along, and the grace is the pod's own unless one is given."""
    call = calls.evict_pod(POD, dry_run=False, grace_seconds=None)
    assert call.target == "/api/v1/namespaces/ns/pods/p/eviction"
    assert call.body is not None
    assert call.body["deleteOptions"] == {"preconditions": {"uid": "u"}}


def test_a_dry_run_is_said_twice() -> None:
    """Query and body both say it: a server or proxy that misses one sees the other."""
    call = calls.evict_pod(POD, dry_run=True, grace_seconds=0)
    assert call.target.endswith("?dryRun=All")
    assert call.body is not None
    assert call.body["deleteOptions"] == {"preconditions": {"uid": "u"}, "dryRun": ["All"], "gracePeriodSeconds": 0}


@pytest.mark.parametrize("name", ["a/../b", "a?x=y", "a b", "a%2fb"])
def test_names_cannot_leave_their_place(name: str) -> None:
    """A name from the environment stays one segment of the path."""
    assert calls.get_node(name).target.count("/") == 4
    assert "?" not in calls.get_node(name).target


def test_a_field_selector_cannot_be_widened() -> None:
    """The signs with a meaning in field selectors are escaped."""
    assert calls.list_pods("a,b=c").query["fieldSelector"] == r"spec.nodeName=a\,b\=c"


def test_an_access_review_splits_the_subresource() -> None:
    """`pods/eviction` is resource and subresource; empty fields are left out."""
    body = calls.review_access("create", "", "pods/eviction", "").body
    assert body is not None
    assert body["spec"] == {"resourceAttributes": {"verb": "create", "resource": "pods", "subresource": "eviction"}}
