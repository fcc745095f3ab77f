"""Evictions: refusals, budgets, pods that go by themselves, and the drain of the whole node."""

from itertools import pairwise

import pytest

from driver_manager import names
from driver_manager.core.snapshot import Owner, Toleration
from driver_manager.errors import Conflict, EvictionBlocked, Forbidden
from driver_manager.sim.faults import Do, Fail
from driver_manager.sim.objects import PodSpec, UnhealthyPolicy
from driver_manager.sim.scenarios import NODE, SPARE_NODE
from tests.agent.stage import Stage, gpu_pod, play, small_world


def tries_of(stage: Stage, start: str) -> list[float]:
    """When a real eviction of a pod was asked for."""
    calls = stage.world.faults.calls
    return [
        call.at
        for call in calls
        if call.name == "evict" and call.when == "before" and not call.args["dry_run"] and str(call.args["pod"]).startswith(start)
    ]


# Refusals -----------------------------------------------------------------------------------------------------------


def test_n06_r05_all_refusals_in_one_error_before_anything_is_changed() -> None:
    """N06, R5: CPU pods are ignored; every GPU pod that may not go is named with its setting; nobody is evicted, nothing written."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.add_pod("dashboard", PodSpec(has_empty_dir=True), node=NODE, owner=Owner("ReplicaSet", "dashboard"))
        world.add_pod("bare-cpu", PodSpec(), node=NODE)
        gpu_pod(world, "cache-0", PodSpec(gpus=1, has_empty_dir=True))
        world.add_pod("notebook", PodSpec(gpus=1), node=NODE)
        run = await stage.run()
        assert run.code == 65
        assert "default/cache-0" in run.sentence
        assert "DRAIN_DELETE_EMPTYDIR_DATA" in run.sentence
        assert "default/notebook" in run.sentence
        assert "DRAIN_USE_FORCE" in run.sentence
        assert "dashboard" not in run.sentence
        assert "bare-cpu" not in run.sentence
        assert stage.evicted == []
        assert stage.node_writes() == []
        stage.assert_host_untouched()
        await stage.assert_put_back()

    play(story)


def test_n06_the_named_settings_allow_it() -> None:
    """N06: with the settings that the refusal named the same node is freed, and the CPU pods stay."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.add_pod("dashboard", PodSpec(has_empty_dir=True), node=NODE, owner=Owner("ReplicaSet", "dashboard"))
        gpu_pod(world, "cache-0", PodSpec(gpus=1, has_empty_dir=True))
        world.add_pod("notebook", PodSpec(gpus=1), node=NODE)
        run = await stage.run(drain_use_force=True, drain_delete_emptydir_data=True)
        assert run.code == 0
        assert {"default/cache-0", "default/notebook"} < set(stage.evicted)
        assert world.pod("default", "dashboard").marked_at is None
        await stage.assert_put_back()

    play(story)


def test_n11_r05_a_static_pod_with_a_gpu() -> None:
    """N11, R5: a mirror pod that uses a GPU stops the run before anything is changed, with what to do; one without is no matter."""

    async def story(stage: Stage) -> None:
        stage.world.add_mirror_pod("etcd", node=NODE)
        mirror = stage.world.add_mirror_pod("burn-in", PodSpec(gpus=1), node=NODE)
        run = await stage.run()
        assert run.code == 65
        assert mirror.ref in run.sentence
        assert "manifest" in run.sentence
        assert "etcd" not in run.sentence
        assert stage.evicted == []
        assert stage.node_writes() == []

    play(story)


def test_n11_own_and_opted_out_pods_stay() -> None:
    """N11: our own pod and pods with the skip label are never evicted, mirror pods without a GPU are left, the run succeeds."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.add_mirror_pod("etcd", node=NODE)
        skipped = gpu_pod(world, "controller-0", PodSpec(resources=frozenset({"nvidia.com/gpu"}), labels={names.DRAIN_SKIP: "true"}))
        run = await stage.run()
        assert run.code == 0
        assert skipped.marked_at is None
        assert len(stage.evicted) == 2
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("tolerates_all", [True, False])
def test_n02_a_daemon_set_that_uses_gpus(tolerates_all: bool) -> None:
    """N02: kept off by the taint it is evicted once and back after the run; one that tolerates everything is refused with its owner."""

    async def story(stage: Stage) -> None:
        tolerations = (Toleration("", "Exists"),) if tolerates_all else ()
        spec = PodSpec(gpus=1, stop_seconds=0.5, tolerations=tolerations)
        stage.world.add_daemon_set("exporter", spec, namespace="monitoring")
        uid = next(pod.uid for pod in stage.world.pods(NODE) if pod.name.startswith("exporter"))
        run = await stage.run()
        if tolerates_all:
            assert run.code == 65
            assert "monitoring/exporter" in run.sentence
            assert stage.evicted == []
            assert stage.node_writes() == []
        else:
            assert run.code == 0
            stage.assert_free()
            there = [one for one in stage.world.store.diary if one.what == "create" and one.target.startswith("monitoring/exporter")]
            assert all(one.at > stage.unloads()[-1][0] for one in there if one.detail == NODE and one.at > 0)
        await stage.assert_put_back()
        again = [pod.uid for pod in stage.world.pods(NODE) if pod.name.startswith("exporter")]
        assert len(again) == 1
        assert (again[0] == uid) == tolerates_all

    play(story, small_world(tolerates_us=True))


# Budgets ------------------------------------------------------------------------------------------------------------


def test_a_budget_that_never_allows() -> None:
    """N07, R6: at most one try in two seconds, the budget on the node within three, none of the others evicted, exit 75 at 60 s."""

    async def story(stage: Stage) -> None:
        world = stage.world
        web = world.add_deployment("web", PodSpec(gpus=1), node=NODE)
        world.add_budget("web-budget", {"app": "web"}, min_available=1)
        named: list[dict[str, object]] = []
        stage.later(2.9, lambda: named.append(stage.status))
        run = await stage.run(drain_timeout=60.0)
        assert run.code == 75
        assert 54 <= stage.now <= 66
        assert "web-budget" in str(named[0]["blockers"])
        assert "needs 1 healthy pods and has 1" in str(named[0]["blockers"])
        tries = tries_of(stage, "default/web")
        assert len(tries) > 4
        assert all(later - earlier >= 2.0 for earlier, later in pairwise(tries))
        assert stage.evicted == []
        assert world.store.pods_of(web.uid)[0].marked_at is None
        assert "web-budget" in run.sentence
        assert "web-budget" in str(stage.status)
        stage.assert_host_untouched()
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=5))


def test_n07_the_end_names_the_budget_first() -> None:
    """N07: where there is room for one name only, it is that of the pod whose budget says no, not of those that wait behind it."""

    async def story(stage: Stage) -> None:
        for name in ("aaa", "zzz"):
            gpu_pod(stage.world, name)
        gpu_pod(stage.world, "guarded", PodSpec(gpus=1, labels={"app": "guarded"}))
        stage.world.add_budget("guard", {"app": "guarded"}, min_available=1)
        run = await stage.run(drain_timeout=5.0)
        assert run.code == 75
        first, *others = run.sentence.partition(" for ")[2].split("; ")
        assert first.startswith("pod default/guarded, which the budget guard does not let go")
        assert any(each.startswith("pod default/aaa to be evicted after that") for each in others)
        assert stage.evicted == []
        assert stage.status["message"].index("guarded") < stage.status["message"].index("aaa")

    play(story)


def test_n59_a_limit_is_the_limit() -> None:
    """N59: a limit smaller than any default is used as given, within a tenth."""

    async def story(stage: Stage) -> None:
        stage.world.add_deployment("web", PodSpec(gpus=1), node=NODE)
        stage.world.add_budget("web", {"app": "web"}, min_available=1)
        run = await stage.run(drain_timeout=5.0)
        assert run.code == 75
        assert 4.5 <= stage.now <= 5.5

    play(story)


def test_n07_the_server_says_when_to_come_back() -> None:
    """N07: a 429 that names no budget is retried after the time that the server asked for."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on(
            "evict",
            Fail(lambda: EvictionBlocked("too many requests", retry_after=7.0)),
            where=lambda call: not call.args["dry_run"] and str(call.args["pod"]).startswith("default/db"),
        )
        gpu_pod(stage.world, "db-0")
        assert (await stage.run()).code == 0
        first, second = tries_of(stage, "default/db")
        assert 7.0 <= second - first < 8.5
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("policy", list(UnhealthyPolicy))
def test_n07_a_crash_looping_pod_behind_a_budget(policy: UnhealthyPolicy) -> None:
    """N07: with AlwaysAllow an unready pod goes; with the default policy the run fails with the budget named."""

    async def story(stage: Stage) -> None:
        stage.world.add_deployment("crashing", PodSpec(gpus=1, is_ready=False), node=NODE)
        stage.world.add_budget("guard", {"app": "crashing"}, min_available=1, unhealthy=policy)
        run = await stage.run(drain_timeout=10.0)
        if policy is UnhealthyPolicy.ALWAYS_ALLOW:
            assert run.code == 0
        else:
            assert run.code == 75
            assert "guard" in run.sentence
            assert stage.evicted == []
        await stage.assert_put_back()

    play(story)


def test_two_budgets_on_one_pod_are_a_refusal() -> None:
    """Decision 13, R5: the server never evicts a pod with two budgets, so that is found before anything is changed."""

    async def story(stage: Stage) -> None:
        stage.world.add_deployment("web", PodSpec(gpus=1), node=NODE)
        stage.world.add_budget("one", {"app": "web"}, min_available=0)
        stage.world.add_budget("two", {"app": "web"}, min_available=0)
        run = await stage.run()
        assert run.code == 65
        assert "more than one PodDisruptionBudget" in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []

    play(story)


def test_a_budget_that_frees_up_goes_first() -> None:
    """Decision 13: pods refused by the dry run are evicted first, the others only once those are accepted."""

    async def story(stage: Stage) -> None:
        stage.world.add_deployment("web", PodSpec(gpus=1), node=NODE)
        made = stage.world.add_budget("web", {"app": "web"}, min_available=1)
        stage.later(6.0, lambda: stage.world.set_budget(made, min_available=0))
        assert (await stage.run()).code == 0
        assert stage.evicted[0].startswith("default/web")
        assert stage.world.evictions[0][0] > 6.0
        await stage.assert_put_back()

    play(story)


# Pods that go by themselves -----------------------------------------------------------------------------------------


def test_n08_a_terminating_namespace() -> None:
    """N08: 403 because the namespace is being deleted is no error; the pod is waited for."""

    async def story(stage: Stage) -> None:
        gpu_pod(stage.world, "job-0", PodSpec(gpus=1, stop_seconds=4.0), namespace="leaving")
        stage.world.store.latencies.daemon_set = 0.5  # until the sweep of the namespace comes to the pod
        stage.world.delete_namespace("leaving")
        run = await stage.run()
        assert run.code == 0
        assert "leaving/job-0" not in stage.evicted
        assert stage.unloads()[0][0] > 4.0
        await stage.assert_put_back()

    play(story)


def test_n08_a_plain_403_is_a_permission_problem() -> None:
    """N08: any other 403 fails the run at once, as a permission problem, with everything put back."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on(
            "evict", Fail(lambda: Forbidden("denied by webhook, may not create pods/eviction")), where=lambda call: not call.args["dry_run"]
        )
        run = await stage.run()
        assert run.code == 77
        assert "create pods/eviction" in run.sentence
        assert stage.now < 1.0
        await stage.assert_put_back()

    play(story)


def test_n08_a_pod_that_is_gone_when_it_is_evicted() -> None:
    """N08: 404 on eviction is success."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "db-0", PodSpec(gpus=1, stop_seconds=0.0))
        stage.world.faults.on(
            "evict",
            Do(lambda: stage.world.delete_pod(pod, 0)),
            where=lambda call: not call.args["dry_run"] and call.args["pod"] == "default/db-0",
        )
        assert (await stage.run()).code == 0
        assert "default/db-0" not in stage.evicted
        await stage.assert_put_back()

    play(story)


def test_n08_a_stateful_pod_that_moved_is_left_alone() -> None:
    """N08: web-0 of the same name and another uid on another node is never evicted."""

    async def story(stage: Stage) -> None:
        old = gpu_pod(stage.world, "web-0", PodSpec(gpus=1, labels={"app": "web"}, stop_seconds=0.0))
        budget = stage.world.add_budget("web", {"app": "web"}, min_available=1)

        def move() -> None:
            stage.world.delete_pod(old, 0)
            stage.world.add_pod("web-0", old.spec, node=SPARE_NODE, owner=old.owner)
            stage.world.remove_budget(budget)

        stage.later(3.0, move)
        run = await stage.run()
        assert run.code == 0
        assert "default/web-0" not in stage.evicted
        assert stage.world.pod("default", "web-0").marked_at is None
        await stage.assert_put_back()

    play(story)


def test_n08_a_conflict_means_another_pod() -> None:
    """N08: the uid in the request does not fit any more: it is not asked again."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "db-0", PodSpec(gpus=1, stop_seconds=0.0))
        stage.world.faults.on(
            "evict", Fail(lambda: Conflict("uid")), where=lambda call: not call.args["dry_run"] and call.args["pod"] == "default/db-0"
        )
        stage.later(1.0, lambda: stage.world.delete_pod(pod, 0))
        assert (await stage.run()).code == 0
        assert len(tries_of(stage, "default/db-0")) == 1

    play(story)


def test_a_pod_that_finishes_meanwhile_is_not_waited_for() -> None:
    """A job that ends by itself before it may be evicted uses the driver no more, though it stays in the API."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "job-0", PodSpec(gpus=1, labels={"app": "job"}), owner=Owner("Job", "job"))
        stage.world.add_budget("job", {"app": "job"}, min_available=1)
        stage.later(4.0, lambda: stage.world.kubelets.finish(pod))
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 15
        assert "default/job-0" not in stage.evicted
        assert not pod.is_gone
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("grace", [30, 600])
def test_n10_a_pod_that_never_goes(grace: int) -> None:
    """N10, R6: at the deadline the run ends with the pod's name; nothing is forced, no grace is shortened."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "stuck-0", PodSpec(gpus=1, stop_seconds=None, grace_seconds=grace))
        run = await stage.run(drain_timeout=20.0)
        assert run.code == 75
        assert "default/stuck-0" in run.sentence
        assert pod.deletion_grace == grace
        assert not pod.is_gone
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story)


def test_r08_an_operand_that_never_goes() -> None:
    """R8: after the limit for operands the run ends with the pod's name, everything put back, exit 75."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, labels={names.DEPLOY_PREFIX + "nvsm": "true"})
        stage.before.labels[names.DEPLOY_PREFIX + "nvsm"] = "true"  # type: ignore[index]
        stage.world.add_daemon_set("nvsm", PodSpec(node_selector={names.DEPLOY_PREFIX + "nvsm": "true"}, stop_seconds=None))
        run = await stage.run(operand_timeout=30.0)
        assert run.code == 75
        assert "gpu-operator/nvsm-" in run.sentence
        assert 29 <= stage.now <= 32
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story)


# The drain of the whole node ----------------------------------------------------------------------------------------


def hidden_user(stage: Stage) -> None:
    """A pod that holds a GPU without saying so, beside a CPU pod, a DaemonSet's and a mirror pod."""
    world = stage.world
    world.add_pod("hidden", PodSpec(devices=("/dev/nvidia0", "/dev/nvidiactl")), node=NODE, owner=Owner("ReplicaSet", "hidden"))
    world.add_pod("cpu", PodSpec(), node=NODE, owner=Owner("ReplicaSet", "cpu"))
    world.add_daemon_set("logs", PodSpec(), namespace="kube-system")
    world.add_mirror_pod("etcd", node=NODE)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_drain_is_a_fallback(is_on: bool) -> None:
    """Decision 20: a holder that remains is drained only where that is switched on; DaemonSets' and mirror pods stay."""

    async def story(stage: Stage) -> None:
        hidden_user(stage)
        run = await stage.run(enable_auto_drain=is_on, holder_timeout=20.0, hidden_consumers="ignore")
        if is_on:
            assert run.code == 0
            assert {"default/hidden", "default/cpu"} < set(stage.evicted)
            stage.assert_free()
        else:
            assert run.code == 75
            assert "default/hidden" in run.sentence
            assert "default/cpu" not in stage.evicted
        assert not any("logs" in ref or "etcd" in ref for ref in stage.evicted)
        await stage.assert_put_back()

    play(story)


def test_no_drain_where_nothing_remains() -> None:
    """Decision 20: with the drain switched on, a node that is free after the GPU evictions keeps its CPU pods."""

    async def story(stage: Stage) -> None:
        cpu = stage.world.add_pod("cpu", PodSpec(), node=NODE, owner=Owner("ReplicaSet", "cpu"))
        assert (await stage.run(enable_auto_drain=True)).code == 0
        assert cpu.marked_at is None

    play(story)


def test_a_drain_leaves_what_it_may_not_take() -> None:
    """R9: one pod that a drain may not take does not keep the others, nor the wait for processes that end by themselves."""

    async def story(stage: Stage) -> None:
        hidden_user(stage)
        stage.world.add_pod("bare", PodSpec(), node=NODE)
        run = await stage.run(enable_auto_drain=True, hidden_consumers="ignore")
        assert run.code == 0
        assert stage.world.pod("default", "bare").marked_at is None
        await stage.assert_put_back()

    play(story)
