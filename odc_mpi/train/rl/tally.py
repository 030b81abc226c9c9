"""The numbers of rollouts: counts of a rank, which it tells at point A, and the metrics of all ranks. Local."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.rollout.rewards import Scored
from odc_mpi.rollout.sample import Completions
from odc_mpi.shard import model as sharded
from odc_mpi.train.rl.group_sums import GroupSums

#: Whole numbers, whose sums are exact.
_COUNTS = (
    *("completions", "completion_tokens", "learnt_tokens", "prompt_tokens", "cut"),
    *("scored", "groups", "equal_groups", "failed_rewards"),
)
#: Of this rank: seconds that it generated, rewards included, and waited for groups of others; groups that it generated
#: and trained, the trained ones that another rank generated, and those that found no room in its store.
_OWN = ("generate_s", "rollout_wait_s", "groups_generated", "groups_trained", "groups_from_others", "groups_kept")


class Tally:
    """Counts of a step. Local.

    Args:
        rewards: Names of the reward functions.
        num_groups: The most prompt groups of a minibatch.

    Attributes:
        names: Of the numbers that a rank tells.
    """

    def __init__(self, rewards: Sequence[str], num_groups: int) -> None:
        self._rewards = rewards
        functions = range(len(rewards))
        sums = ("length", "entropy", "reward", "squared_reward", *(f"function_{i}_sum" for i in functions))
        self._sums = GroupSums(sums, num_groups)
        self._counts = (*_COUNTS, *_OWN, "shortest", "longest", *(f"function_{i}_count" for i in functions))
        self.names = (*self._counts, *self._sums.names)
        self.begin()

    def begin(self) -> None:
        """Start at zero. Local."""
        self._values = dict.fromkeys(self._counts, 0.0) | {"shortest": np.inf}
        self._sums.begin()

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to one of this rank's own numbers, those of `_OWN`. Local."""
        self._values[name] += value

    def add_group(self, position: int, found: Completions, scored: Scored, masked: npt.NDArray[np.bool_]) -> None:
        """Count a group that this rank generated. Local.

        Args:
            position: Of its prompt in the minibatch.
            found: Its completions.
            scored: Their rewards.
            masked: Of each completion, whether nothing is learnt from it.
        """
        lengths = np.array([len(tokens) for tokens in found.tokens])
        rewards = scored.total[~np.isnan(scored.total)]
        added = {
            "completions": len(lengths),
            "completion_tokens": lengths.sum(),
            "learnt_tokens": lengths[~masked].sum(),
            "cut": len(lengths) - sum(found.stopped),
            "scored": len(rewards),
            "groups": 1,
            "equal_groups": bool(np.isclose(scored.std, 0.0)),
            "failed_rewards": scored.num_failed,
            "groups_generated": 1,
        }
        summed = {
            "length": lengths.mean(),
            "entropy": found.entropy,
            "reward": rewards.sum(),
            "squared_reward": (rewards**2).sum(),
        }
        for i, values in enumerate(scored.each):
            there = values[~np.isnan(values)]
            added[f"function_{i}_count"] = len(there)
            summed[f"function_{i}_sum"] = there.sum()
        for name, value in added.items():
            self.add(name, float(value))
        for name, value in summed.items():
            self._sums.add(name, position, float(value))
        self._values["shortest"] = min(self._values["shortest"], float(lengths.min()))
        self._values["longest"] = max(self._values["longest"], float(lengths.max()))

    def tell(self) -> list[float]:
        """Return the numbers of this rank, in the order of the names. Local."""
        return [*self._values.values(), *self._sums.tell()]

    def length(self, told: sharded.Minibatch, position: int) -> float:
        """Return the mean length in tokens of the completions of a prompt. Local."""
        return self._sums.part(told, "length", position)

    def report(self, told: sharded.Minibatch) -> dict[str, Any]:
        """Return the metrics of all groups, under TRL's names where it has them. Local."""
        sums = {name: told.total(name) for name in (*_COUNTS, *_OWN)}
        sums |= {name: self._sums.total(told, name) for name in ("entropy", "reward", "squared_reward")}
        tokens, completions = max(1.0, sums["completion_tokens"]), max(1.0, sums["completions"])
        generated, trained = told.per_rank("groups_generated"), told.per_rank("groups_trained")
        metrics = {
            "num_input_tokens": int(sums["completion_tokens"]),
            "num_tokens": int(sums["learnt_tokens"]),
            "reward": sums["reward"] / sums["scored"] if sums["scored"] else None,
            "reward_std": _deviation(sums["scored"], sums["reward"], sums["squared_reward"]),
            "frac_reward_zero_std": sums["equal_groups"] / max(1.0, sums["groups"]),
            "completions/mean_length": sums["completion_tokens"] / completions,
            "completions/min_length": int(told.per_rank("shortest").min()),
            "completions/max_length": int(told.per_rank("longest").max()),
            "completions/clipped_ratio": sums["cut"] / completions,
            "entropy": sums["entropy"] / tokens,
            "failed_rewards": int(sums["failed_rewards"]),
            "groups_generated_min": int(generated.min()),
            "groups_generated_max": int(generated.max()),
            "groups_trained_min": int(trained.min()),
            "groups_trained_max": int(trained.max()),
            "groups_from_others": int(sums["groups_from_others"]),
            "groups_kept": int(sums["groups_kept"]),
            # Means over the ranks.
            "generate_s": float(told.per_rank("generate_s").mean()),
            "rollout_wait_s": float(told.per_rank("rollout_wait_s").mean()),
        }
        for i, name in enumerate(self._rewards):
            count = told.total(f"function_{i}_count")
            metrics[f"rewards/{name}/mean"] = self._sums.total(told, f"function_{i}_sum") / count if count else None
        return metrics


def _deviation(count: float, total: float, squares: float) -> float | None:
    """Return the deviation of rewards with Bessel's correction; None of fewer than two."""
    if count < 2:
        return None
    return float(np.sqrt(max(0.0, squares - total**2 / count) / (count - 1)))
