"""Metrics of rollouts, computed from counts and sums that are gathered from all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.observe.metrics import RESULT, SPEED, Metric
from odc_mpi.rollout.rewards import GroupRewards
from odc_mpi.rollout.sampling import PromptCompletions
from odc_mpi.shard.minibatch_stats import MinibatchStats

#: Names of a rank's counts and durations. `generate_s` includes rewards; `rollout_wait_s` is spent waiting for groups
#: of other ranks. `groups_not_stored` were trained at once, because the memory for published groups was full.
_COUNTS = (
    *("completions", "completion_tokens", "loss_tokens", "trained_tokens", "truncated", "rewarded"),
    *(
        "equal_groups",
        "failed_rewards",
        "staleness",
        "generate_s",
        "rollout_wait_s",
        "groups_generated",
        "groups_trained",
    ),
    *("groups_claimed_from_other_ranks", "groups_not_stored"),
)

#: Declarations of the metrics that `RolloutMetrics` computes.
ROLLOUT_METRICS = (
    Metric("reward", "mean reward", RESULT, "first last", "{:.4f}", ("reward", 8), row="reward", views="watch tile"),
    Metric(
        "completions/mean_length", "mean tokens of a completion", RESULT, "", "{:.1f}", ("length", 7), views="watch"
    ),
    Metric("completions/min_length", "tokens of the shortest completion", RESULT),
    Metric("completions/max_length", "tokens of the longest completion", RESULT),
    Metric("completions/clipped_ratio", "share of truncated completions", RESULT, "", "{:.1%}", ("clipped", 7)),
    Metric("frac_reward_zero_std", "share of groups with equal rewards", RESULT, "", "{:.0%}", ("equal", 5)),
    Metric("reward_std", "standard deviation of the weighted sum of rewards", RESULT),
    Metric("rewards/NAME/mean", "mean of the reward function NAME", RESULT),
    Metric("entropy", "with GRPO mean entropy of sampling in nats", RESULT),
    Metric("failed_rewards", "rewards that failed", RESULT, "sum"),
    Metric("staleness/mean", "steps by which tokens are older than the step that trains them", RESULT, "", "{:.2f}"),
    Metric("staleness/max", "largest such number", RESULT),
    Metric("generate_s", "generating, per rank", SPEED, "sum"),
    Metric("rollout_wait_s", "waiting for completions, per rank", SPEED, "sum"),
    Metric("groups_claimed_from_other_ranks", "prompt groups trained by another rank", SPEED, "sum"),
    Metric("groups_generated_min", "fewest prompt groups that a rank generated", SPEED),
    Metric("groups_generated_max", "most prompt groups that a rank generated", SPEED),
    Metric("groups_trained_min", "fewest prompt groups that a rank trained", SPEED),
    Metric("groups_trained_max", "most prompt groups that a rank trained", SPEED),
    Metric("num_tokens", "loss tokens of the step", SPEED),
    Metric("groups_not_stored", "prompt groups for which the store was full", SPEED),
)


class RolloutMetrics:
    """Metrics for the rollouts in a step, which has at most `num_groups` prompt groups.

    The ranks gather each group's floating-point values separately, so sums do not depend on the order of groups.
    `values` maps the `gathered_names`, in this order, to this rank's values.
    """

    def __init__(self, reward_names: Sequence[str], num_groups: int, *, has_staleness: bool = False) -> None:
        self._reward_names, self._num_groups, self._has_staleness = reward_names, num_groups, has_staleness
        functions = range(len(reward_names))
        counts = (*_COUNTS, "shortest", "longest", "stalest", *(f"function_{i}_count" for i in functions))
        sums = ("length", "entropy", "reward", "squared_reward", *(f"function_{i}_sum" for i in functions))
        self.gathered_names = (*counts, *(f"{name}_{position}" for name in sums for position in range(num_groups)))
        self.reset()

    def reset(self) -> None:
        """Reset all values for the next step."""
        self.values = dict.fromkeys(self.gathered_names, 0.0) | {"shortest": np.inf}

    def add(self, name: str, value: float = 1.0) -> None:
        """Add `value` to this rank's count or duration `name`."""
        self.values[name] += value

    def add_group(
        self,
        step: int,
        position: int,
        completions: PromptCompletions,
        group_rewards: GroupRewards,
        excluded: npt.NDArray[np.bool_],
    ) -> None:
        """Add the group at `position` of the minibatch of `step`.

        `excluded`, bool `[completions]`, marks completions without loss.
        """
        staleness = step - np.concatenate(completions.steps)
        lengths = np.array([len(tokens) for tokens in completions.tokens])
        rewards = group_rewards.rewards[~np.isnan(group_rewards.rewards)]
        added = {
            "completions": len(lengths),
            "completion_tokens": lengths.sum(),
            "loss_tokens": lengths[~excluded].sum(),
            "truncated": len(lengths) - sum(completions.stopped),
            "rewarded": len(rewards),
            "equal_groups": bool(self._reward_names) and bool(np.isclose(group_rewards.std, 0.0)),
            "failed_rewards": group_rewards.num_failed,
            "groups_generated": 1,
            "staleness": staleness.sum(),
            f"length_{position}": lengths.mean(),
            f"entropy_{position}": completions.entropy,
            f"reward_{position}": rewards.sum(),
            f"squared_reward_{position}": (rewards**2).sum(),
        }
        for i, values in enumerate(group_rewards.per_function):
            valid = values[~np.isnan(values)]
            added[f"function_{i}_count"] = len(valid)
            added[f"function_{i}_sum_{position}"] = valid.sum()
        for name, value in added.items():
            self.add(name, float(value))
        self.values["shortest"] = min(self.values["shortest"], float(lengths.min()))
        self.values["stalest"] = max(self.values["stalest"], float(staleness.max()))
        self.values["longest"] = max(self.values["longest"], float(lengths.max()))

    def compute(self, gathered: MinibatchStats) -> dict[str, Any]:
        """Return metrics for the groups of all ranks. Those that TRL also reports have the same names as in TRL."""
        sums = {name: gathered.sum(name) for name in _COUNTS}
        sums |= {name: _total(gathered, name, self._num_groups) for name in ("entropy", "reward")}
        tokens, completions = max(1.0, sums["completion_tokens"]), max(1.0, sums["completions"])
        generated, trained = gathered.per_rank("groups_generated"), gathered.per_rank("groups_trained")
        metrics = {
            "num_input_tokens": int(sums["completion_tokens"]),
            "num_tokens": int(sums["loss_tokens"]),
            "reward": sums["reward"] / sums["rewarded"] if sums["rewarded"] else None,
            "reward_std": reward_std(gathered, self._num_groups),
            "frac_reward_zero_std": sums["equal_groups"] / max(1.0, sums["groups_generated"]),
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
            total = _total(gathered, f"function_{i}_sum", self._num_groups)
            metrics[f"rewards/{name}/mean"] = total / count if count else None
        if self._has_staleness:
            metrics["staleness/mean"] = sums["staleness"] / tokens
            metrics["staleness/max"] = int(gathered.per_rank("stalest").max())
        return metrics


def _total(gathered: MinibatchStats, name: str, num_groups: int) -> float:
    """Return the sum of the values `name` of all groups, computed exactly and rounded once."""
    return math.fsum(gathered.sum(f"{name}_{position}") for position in range(num_groups))


def reward_std(gathered: MinibatchStats, num_groups: int) -> float | None:
    """Return the standard deviation of all rewards of a step, with Bessel's correction, or None if there is just one.

    `gathered` has the values that `RolloutMetrics` reports, of at most `num_groups` prompt groups.
    """
    count = gathered.sum("rewarded")
    if count < 2:
        return None
    total, squares = (_total(gathered, name, num_groups) for name in ("reward", "squared_reward"))
    return float(np.sqrt(max(0.0, squares - total**2 / count) / (count - 1)))
