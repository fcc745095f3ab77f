"""Every case of the tests of NVIDIA's upgrade controller: its library, and the upgrade part of the operator's controllers."""

UPSTREAM = """
BuildState: no pods: empty
BuildState: running pod of a DaemonSet: one node
BuildState: unscheduled pod ignored
BuildState: orphan: an entry without a DaemonSet
ApplyState: nil state fails
ApplyState: nil policy ok
ApplyState: up to date, from unknown: done
ApplyState: up to date, from done: done
ApplyState: outdated, from unknown: upgrade-required
ApplyState: outdated, from done: upgrade-required
ApplyState: cordoned nodes are annotated
ApplyState: safe load, synced, from unknown: upgrade-required
ApplyState: safe load, synced, from done: upgrade-required
Throttle: maxParallel 0: all 5
Throttle: maxParallel 3 of 5: 3
Throttle: maxParallel 4 with 3 in cordon: 1 more
Throttle: 0 and 100 % with 2 cordoned: all 5
Throttle: 0 and 50 % with 2 cordoned last: 3
Throttle: 0 and 50 % with 2 cordoned and done: 1
Throttle: maxParallel 3 and maxUnavailable 2: 2
Throttle: maxParallel 4 and maxUnavailable 4 with 3 in cordon: 1 more
Pod deletion: skipped without a filter: drain-required
Pod deletion: used with a filter: pod-deletion-required
Pod deletion: disabled: drain-required
Drain: skipped if disabled
Drain: scheduled with the policy's settings
Drain: an error of the drain ends the pass
Pod restart: only outdated pods are restarted
Pod restart: a terminating pod is not restarted
Pod restart: safe load is unblocked instead
Pod restart: pod-restart-required and ready: uncordon-required
Pod restart: upgrade-failed and ready: uncordon-required
Pod restart: initially cordoned: done, annotation removed
Pod restart: failed, initially cordoned: done, annotation removed
Pod restart: repeated restarts: upgrade-failed
Pod restart: validation enabled: validation-required
Validation: complete: uncordon-required
Validation: complete, initially cordoned: done
Uncordon: uncordoned and done
Uncordon: an error of the uncordon ends the pass
Orphans: not moved to upgrade-required
Orphans: moved to upgrade-required if requested
Orphans: upgrade-required and requested: cordon-required
Orphans: the request is taken off
Orphans: restarted in pod-restart-required
Orphans: upgrade-failed stays so
Requestor: upgrade-required: node-maintenance-required
Requestor: object made
Requestor: shared requestor appended
Requestor: owner stays while another joins
Requestor: condition Ready: next state
Requestor: condition not Ready
Requestor: object missing: upgrade-required
Requestor: cordon-required continues in place
Requestor: uncordon-required: done
Requestor: object released
Requestor: shared, not owning: released
Requestor: shared, owning: released
Requestor: orphan, requested
Requestor: safe load
Requestor: validation complete, initially cordoned
CordonManager: cordon
CordonManager: uncordon
DrainManager: drains one node
DrainManager: drains all nodes
DrainManager: empty list ok
DrainManager: nil spec is an error
DrainManager: empty spec skipped
DrainManager: disabled skipped
NodeUpgradeStateProvider: state changed
NodeUpgradeStateProvider: annotation set
NodeUpgradeStateProvider: annotation deleted
PodManager: restart deletes only the given pods
PodManager: restart, bad input is an error
PodManager: restart, empty list ok
PodManager: moves only after completion
PodManager: does not move while running
PodManager: moves on timeout
PodManager: eviction with force: pod-restart-required
PodManager: eviction without force fails
PodManager: eviction of emptyDir with the flag
PodManager: eviction of emptyDir without the flag fails
PodManager: eviction done: pod-restart-required
PodManager: eviction failed, drain off: upgrade-failed
PodManager: eviction failed, drain on: drain-required
SafeDriverLoadManager: detect
SafeDriverLoadManager: unblock
ValidationManager: empty selector: validated
ValidationManager: no pods: not validated
ValidationManager: not ready: not validated
ValidationManager: not running: not validated
ValidationManager: timeout: upgrade-failed
ValidationManager: completion removes the annotation
Restart only: equal digest: pod-restart-required
Restart only: other digest: cordon-required
Restart only: no digest: cordon-required
upgrade_controller: drain selector, nil and empty
upgrade_controller: drain selector appended
upgrade_controller: node predicate, state and skip label
upgrade_controller: node predicate, unrelated label
upgrade_controller: no ClusterPolicy, no GPUCluster
upgrade_controller: no ClusterPolicy, a GPUCluster
upgrade_controller: NVIDIADriver without a ClusterPolicy
upgrade_controller: NVIDIADriver without a policy: autoUpgrade
upgrade_controller: NVIDIADriver's pods by component
upgrade_controller: looked at again after 2 minutes
upgrade_controller: an NVIDIADriver that is off cleans up its own nodes
upgrade_controller: ClusterPolicy
upgrade_controller: ClusterPolicy's pods by app
upgrade_controller: sandbox workloads: cleanup
upgrade_controller: a ClusterPolicy that delegates: NVIDIADriver's policy
active_config: oldest, then the name
main: GPU pods by claim
main: GPU pods by resource
""".strip().splitlines()
