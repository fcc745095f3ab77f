"""What PodDisruptionBudgets mean for the pods that a node is freed of: who goes first, and who can never be evicted.

The rules of the eviction: https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from driver_manager.core.fleet import BudgetView
from driver_manager.core.snapshot import PodView


@dataclass(frozen=True, slots=True)
class Order:
    """The pods of a node in the order of their eviction: each part begins when the one before is accepted."""

    scarce: tuple[PodView, ...] = ()
    """Their budget has not room for all of them now, by what was heard of it last."""
    covered: tuple[PodView, ...] = ()
    """All other pods of budgets."""
    free: tuple[PodView, ...] = ()

    @property
    def to_try(self) -> tuple[PodView, ...]:
        """Whom the API server is asked for beforehand: a single pod's eviction says as much by itself, unless it is known to be refused."""
        every = (*self.scarce, *self.covered)
        return every if self.scarce or len(every) > 1 else ()


def in_order(pods: Iterable[PodView], budgets: Iterable[BudgetView]) -> Order:
    """Sorts pods so that none goes in vain because another one may not."""
    pods, budgets = tuple(pods), tuple(budgets)
    covering = {pod.uid: covering_budgets(pod, budgets) for pod in pods}
    wanted = Counter(budget.uid for found in covering.values() for budget in found)
    lacking = {budget.uid for budget in budgets if not budget.is_observed or budget.allowed < wanted[budget.uid]}
    scarce = tuple(pod for pod in pods if any(budget.uid in lacking for budget in covering[pod.uid]))
    covered = tuple(pod for pod in pods if covering[pod.uid] and pod not in scarce)
    return Order(scarce, covered, tuple(pod for pod in pods if not covering[pod.uid]))


def covering_budgets(pod: PodView, budgets: Iterable[BudgetView]) -> tuple[BudgetView, ...]:
    """The budgets that the API server asks for a pod's eviction: none for one that has not begun, has ended, or is on its way."""
    if pod.is_terminating or pod.is_over or pod.phase == "Pending":
        return ()
    return tuple(budget for budget in budgets if budget.covers(pod.namespace, pod.labels))


def never_evicted(pods: Iterable[PodView], budgets: Iterable[BudgetView]) -> tuple[str, ...]:
    """A sentence for each pod of more than one budget, which the API server refuses always."""
    budgets = tuple(budgets)
    found = ((pod, covering_budgets(pod, budgets)) for pod in pods)
    return tuple(
        f"pod {pod.ref} has the budgets {' and '.join(each.name for each in several)}, and the API server evicts no pod of more than one: "
        "take it out of all but one"
        for pod, several in found
        if len(several) > 1
    )
