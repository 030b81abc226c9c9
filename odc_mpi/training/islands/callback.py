"""Callback that runs the outer loop of a training run, and reports its synchronizations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from odc_mpi.islands.change_rule import ChangeRule
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import SummaryField
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.outer_loop import OuterLoop, merge_results


class OuterLoopCallback(Callback):
    """Synchronizes the islands after the steps that the settings select, and averages them after the last step.

    Args:
        num_steps: Number of steps of the run.
        rule: Rule that decides, from the gradient norms, when to synchronize before `islands.sync_every` steps.
    """

    summary: ClassVar = {
        "contributions_left_out": SummaryField("contributions_left_out", "sum"),
        "bytes_between_islands": SummaryField("bytes_between_islands", "per_step"),
        "island_wait_s": SummaryField("island_wait_s", "sum"),
    }

    def __init__(self, loop: OuterLoop, model: ShardedModel, num_steps: int, rule: ChangeRule | None) -> None:
        self.loop, self._model, self._num_steps, self._rule = loop, model, num_steps, rule

    @override
    def on_optimizer_step(self, step: Step) -> None:
        amounts = step.minibatch.island_amounts
        weights = [0] * len(amounts) if step.metrics["skipped"] else amounts
        result = self.loop.step(weights, sync_all=self._has_changed(amounts))
        if step.number == self._num_steps:
            result = merge_results([each for each in (result, self.loop.average()) if each])
        step.metrics |= result._asdict() if result else {"bytes_between_islands": 0.0, "island_wait_s": 0.0}

    def _has_changed(self, amounts: Sequence[int]) -> bool:
        if self._rule is None:
            return False
        # Each island has only its share of the gradient of the minibatch.
        shares = [amount / sum(amounts) for amount in amounts]
        norms = zip(self._model.replica_norms, shares, strict=True)
        return self._rule.update([norm / share if share else math.nan for norm, share in norms])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"outer": {**self.loop.state_dict(), "change_rule": self._rule and self._rule.state_dict()}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the outer loop, if the checkpoint is of a run with one."""
        if state := state_dict.get("outer"):
            self.loop.load_state_dict(state)
            if self._rule and state["change_rule"]:
                self._rule.load_state_dict(state["change_rule"])
