"""Metrics of rollouts, computed from counts and sums that are gathered from all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.rollout.rewards import GroupRewards
from odc_mpi.rollout.sample import PromptCompletions
from odc_mpi.shard import model as sharded

#: Names of integer counts, whose sums over all ranks are exact.
_COUNTS = (
    *("completions", "completion_tokens", "loss_tokens", "prompt_tokens", "truncated"),
    *("rewarded", "groups", "equal_groups", "failed_rewards"),
)
#: Names of per-rank values: seconds spent on generation, including rewards, and on waiting for groups from other ranks;
#: numbers of groups that the rank generated, trained on, trained on after another rank generated them, and could not
#: publish because the memory for published groups was full.
_PER_RANK = (
    *("generate_s", "rollout_wait_s", "groups_generated", "groups_trained"),
    *("groups_claimed_from_other_ranks", "groups_not_stored"),
)


class GroupSums:
    """Named sums over at most `num_groups` prompt groups. The ranks gather the summand of each group separately.

    A floating-point sum depends on the order of its terms, so all ranks add the summands in the order of the prompts,
    no matter which rank generated a group or trained on it. A group's summand is 0 on all ranks but one.
    """

    def __init__(self, sums: Sequence[str], num_groups: int) -> None:
        self._num_groups = num_groups
        self.gathered_names = tuple(_name(each, position) for each in sums for position in range(num_groups))
        self.reset()

    def reset(self) -> None:
        """Set all summands to 0."""
        self._values = dict.fromkeys(self.gathered_names, 0.0)

    def add(self, name: str, position: int, value: float) -> None:
        """Add `value` to a group's summand in the sum `name`. `position` is the index of the group in the minibatch."""
        self._values[_name(name, position)] += value

    def local_values(self) -> list[float]:
        """Return this rank's summands in the order of `gathered_names`."""
        return list(self._values.values())

    def value_of(self, gathered: sharded.MinibatchStats, name: str, position: int) -> float:
        """Return a group's summand in the sum `name`. `position` is the index of the group in the minibatch."""
        return gathered.sum(_name(name, position))

    def total(self, gathered: sharded.MinibatchStats, name: str) -> float:
        """Return the sum `name` over all groups, computed exactly and rounded once."""
        return math.fsum(self.value_of(gathered, name, position) for position in range(self._num_groups))


def _name(name: str, position: int) -> str:
    return f"{name}_{position}"


class RolloutMetrics:
    """Metrics of the rollouts of a step that has at most `num_groups` prompt groups."""

    def __init__(self, reward_names: Sequence[str], num_groups: int) -> None:
        self._reward_names = reward_names
        functions = range(len(reward_names))
        sums = ("length", "entropy", "reward", "squared_reward", *(f"function_{i}_sum" for i in functions))
        self._sums = GroupSums(sums, num_groups)
        self._counts = (*_COUNTS, *_PER_RANK, "shortest", "longest", *(f"function_{i}_count" for i in functions))
        self.gathered_names = (*self._counts, *self._sums.gathered_names)
        self.reset()

    def reset(self) -> None:
        """Reset all counts and sums for the next step."""
        self._values = dict.fromkeys(self._counts, 0.0) | {"shortest": np.inf}
        self._sums.reset()

    def add(self, name: str, value: float = 1.0) -> None:
        """Add `value` to this rank's count or duration `name`."""
        self._values[name] += value

    def add_group(
        self,
        position: int,
        completions: PromptCompletions,
        group_rewards: GroupRewards,
        excluded: npt.NDArray[np.bool_],
    ) -> None:
        """Add a prompt group that this rank generated.

        `position` is the index of the group in the minibatch. `excluded`, bool `[completions]`, is True for each
        completion that is excluded from the loss.
        """
        lengths = np.array([len(tokens) for tokens in completions.tokens])
        rewards = group_rewards.rewards[~np.isnan(group_rewards.rewards)]
        added = {
            "completions": len(lengths),
            "completion_tokens": lengths.sum(),
            "loss_tokens": lengths[~excluded].sum(),
            "truncated": len(lengths) - sum(completions.stopped),
            "rewarded": len(rewards),
            "groups": 1,
            "equal_groups": bool(np.isclose(group_rewards.std, 0.0)),
            "failed_rewards": group_rewards.num_failed,
            "groups_generated": 1,
        }
        summed = {
            "length": lengths.mean(),
            "entropy": completions.entropy,
            "reward": rewards.sum(),
            "squared_reward": (rewards**2).sum(),
        }
        for i, values in enumerate(group_rewards.per_function):
            valid = values[~np.isnan(values)]
            added[f"function_{i}_count"] = len(valid)
            summed[f"function_{i}_sum"] = valid.sum()
        for name, value in added.items():
            self.add(name, float(value))
        for name, value in summed.items():
            self._sums.add(name, position, float(value))
        self._values["shortest"] = min(self._values["shortest"], float(lengths.min()))
        self._values["longest"] = max(self._values["longest"], float(lengths.max()))

    def local_values(self) -> list[float]:
        """Return this rank's values, in the order of `gathered_names`."""
        return [*self._values.values(), *self._sums.local_values()]

    def mean_length(self, gathered: sharded.MinibatchStats, position: int) -> float:
        """Return the mean completion length, in tokens, for the prompt at index `position` in the minibatch."""
        return self._sums.value_of(gathered, "length", position)

    def compute(self, gathered: sharded.MinibatchStats) -> dict[str, Any]:
        """Return the metrics over the groups of all ranks. Metrics that TRL also reports are named as in TRL."""
        sums = {name: gathered.sum(name) for name in (*_COUNTS, *_PER_RANK)}
        sums |= {name: self._sums.total(gathered, name) for name in ("entropy", "reward", "squared_reward")}
        tokens, completions = max(1.0, sums["completion_tokens"]), max(1.0, sums["completions"])
        generated, trained = gathered.per_rank("groups_generated"), gathered.per_rank("groups_trained")
        metrics = {
            "num_input_tokens": int(sums["completion_tokens"]),
            "num_tokens": int(sums["loss_tokens"]),
            "reward": sums["reward"] / sums["rewarded"] if sums["rewarded"] else None,
            "reward_std": _standard_deviation(sums["rewarded"], sums["reward"], sums["squared_reward"]),
            "frac_reward_zero_std": sums["equal_groups"] / max(1.0, sums["groups"]),
            "completions/mean_length": sums["completion_tokens"] / completions,
            "completions/min_length": int(gathered.per_rank("shortest").min()),
            "completions/max_length": int(gathered.per_rank("longest").max()),
            "completions/clipped_ratio": sums["truncated"] / completions,
            "entropy": sums["entropy"] / tokens,
            "failed_rewards": int(sums["failed_rewards"]),
            "groups_generated_min": int(generated.min()),
            "groups_generated_max": int(generated.max()),
            "groups_trained_min": int(trained.min()),
            "groups_trained_max": int(trained.max()),
            "groups_claimed_from_other_ranks": int(sums["groups_claimed_from_other_ranks"]),
            "groups_not_stored": int(sums["groups_not_stored"]),
            # Means over the ranks.
            "generate_s": float(gathered.per_rank("generate_s").mean()),
            "rollout_wait_s": float(gathered.per_rank("rollout_wait_s").mean()),
        }
        for i, name in enumerate(self._reward_names):
            count = gathered.sum(f"function_{i}_count")
            metrics[f"rewards/{name}/mean"] = self._sums.total(gathered, f"function_{i}_sum") / count if count else None
        return metrics


def _standard_deviation(count: float, total: float, squares: float) -> float | None:
    """Return the standard deviation of rewards with Bessel's correction, or None if there are fewer than two."""
    if count < 2:
        return None
    return float(np.sqrt(max(0.0, squares - total**2 / count) / (count - 1)))
