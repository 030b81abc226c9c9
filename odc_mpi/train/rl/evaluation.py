"""Rewards of held-out prompts, beside the training: greedy completions, by tickets, between two steps."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.prompts import Prompts
from odc_mpi.models.decoding import on_this_rank
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.rollout.builtin_rewards import exact_match
from odc_mpi.rollout.rewards import Reward, score
from odc_mpi.rollout.sample import Completions, GroupSampling, sample
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.train.evaluation import HeldOut
from odc_mpi.train.rl.prompts import PromptText
from odc_mpi.train.settings import Config

#: In an exact run prompts are decoded together as if there were so many ranks.
_EXACT_SHARES = 16


class RewardEvaluation(HeldOut):
    """The rewards of held-out prompts. Making one is collective."""

    columns: ClassVar = (
        Column("eval", 8, lambda line: f"{line['eval_reward']:.4f}" if line.get("eval_reward") is not None else ""),
    )
    summary: ClassVar = {
        "eval_reward_start": Entry("eval_reward_start", "first"),
        "eval_exact_match_start": Entry("eval_exact_match_start", "first"),
        "eval_reward": Entry("eval_reward", "last"),
        "eval_exact_match": Entry("eval_exact_match", "last"),
        "eval_s": Entry("eval_s", "sum"),
    }

    def __init__(
        self,
        config: Config,
        world: World,
        model: ShardedModel,
        prompts: Prompts,
        rewards: list[Reward],
    ) -> None:
        super().__init__(config.run)
        self._rl, self._world, self._model = config.rl, world, model
        self._prompts, self._rewards = prompts, rewards
        self._text, self._tickets = PromptText(prompts), Tickets(world)
        count = min(config.data.eval_sequences or len(prompts), len(prompts))
        shares = _EXACT_SHARES if config.run.exact else world.size
        together = max(1, min(config.rl.max_concurrent_sequences, -(-count // shares)))
        order = sorted(range(count), key=lambda i: (-int(prompts.lengths[i]), i))
        self._decoded = [order[begin : begin + together] for begin in range(0, count, together)]
        self._note: Callable[[str], None] = world.note

    def evaluate(self) -> dict[str, Any]:
        """Return mean reward, exact match and mean length, the same on every rank. Collective at the end."""
        sampling = GroupSampling(1, self._rl.max_completion_length, temperature=0.0)
        found: list[tuple[int, float, float, int]] = []
        with self._model.doing("evaluating") as self._note, on_this_rank(self._model):
            for ticket in self._tickets.draw(len(self._decoded)):
                indices = self._decoded[ticket]
                prompts = [self._text.tokens(index, self._prompts[index]) for index in indices]

                def deliver(i: int, made: Completions, indices: list[int] = indices) -> None:
                    found.append(self._figures_of(indices[i], made))

                sample(cast(Any, self._model.module), prompts, sampling, deliver, self._tell_token)
        # In the order of prompts, so that sums are the same whoever generated what.
        everyone = sorted(one for own in self._world.gather_objects(found) for one in own)
        self._tickets.reset()  # all have drawn; nobody draws again before the next B
        rewards, matches, lengths = (np.array([one[i] for one in everyone], dtype=np.float64) for i in (1, 2, 3))
        return {
            "eval_reward": _mean(rewards),
            "eval_exact_match": _mean(matches),
            "eval_mean_length": _mean(lengths),
        }

    def _tell_token(self, token: int) -> None:
        self._note(f"evaluating, token {token:,} of {self._rl.max_completion_length:,}")

    def _figures_of(self, index: int, made: Completions) -> tuple[int, float, float, int]:
        """Return the number of a prompt, reward, exact match (NaN without an answer) and length of its completion."""
        row = self._prompts[index]
        arguments = self._text.arguments(row, made.tokens)
        self._note(f"computing rewards of prompt {index}")
        scored = score(
            self._rewards,
            arguments,
            index,
            self._world.rank,
            timeout_s=self._rl.reward_timeout_s,
            skip=self._rl.skip_failed_rewards,
        )
        match = exact_match(**arguments)[0]
        return index, float(scored.total[0]), np.nan if match is None else match, len(made.tokens[0])


def _mean(values: np.ndarray) -> float | None:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None
