"""Callback that runs the outer loop of a training run, and reports its synchronizations."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from odc_mpi.islands.change_rule import ChangeRule
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import SummaryField
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.outer_loop import OuterLoop


class OuterLoopCallback(Callback):
    """Synchronizes the islands after the steps that the settings select, and all fragments after the last step.

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
        tokens = [0] * self.loop.num_islands if step.metrics["skipped"] else step.minibatch.island_tokens
        has_changed = self._rule is not None and self._rule.update(self._model.replica_norms)
        result = self.loop.step(tokens, sync_all=has_changed or step.number == self._num_steps)
        step.metrics |= result._asdict() if result else {"bytes_between_islands": 0.0, "island_wait_s": 0.0}

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
