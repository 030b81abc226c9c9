"""Rollouts as microbatches: a rank generates as long as there are prompts, then trains what is finished, whoever's.

draw a ticket    a decode batch of prompt groups, those expected to be longest first        one-sided
generate         each group, when its last completion has ended, gets its rewards and
                 advantages, and goes to the exchange; what finds no room there is
                 trained by this rank                                                       one-sided
no prompts left  claim the largest finished group of any rank and train it                  one-sided
nothing to do    sleep, until a group is finished or all are
A                the numbers of all groups meet

In an exact run (`train.exact`) each group is decoded and trained by itself: what is in a batch with a completion, which
depends on ranks and their speeds, would change the last bits of its logits and gradients.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.work_queue import QueueState, WorkQueue
from odc_mpi.data.loader import Microbatch, Minibatch
from odc_mpi.data.prompt_dataset import PromptDataset, PromptRecord
from odc_mpi.models.decoding import unsharded_if_fits
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.rollout.groups import RolloutGroup, pack_microbatches
from odc_mpi.rollout.rewards import GroupRewards, RewardFunction, compute_rewards
from odc_mpi.rollout.sample import PromptCompletions, RolloutSamplingParams, SampleFn, sample
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import MinibatchSource
from odc_mpi.training.rl.lengths import CompletionLengthPredictor
from odc_mpi.training.rl.metrics import RolloutMetrics
from odc_mpi.training.rl.prompts import PromptCodec, PromptLoader
from odc_mpi.training.settings import Config

#: Sleep between two looks for finished groups, at first and at most.
_SLEEP_S, _MAX_SLEEP_S = 0.5e-3, 5e-3


class RolloutSource(MinibatchSource):
    """Prompts, generated from and trained on within one minibatch. Making one is collective.

    Args:
        engine: What generates.

    Attributes:
        logged_completions: Of the last step, if completions of it are to be shown: those that this rank generated, for people.
    """

    columns: ClassVar = (
        ProgressColumn("reward", 8, lambda line: "-" if line["reward"] is None else f"{line['reward']:.4f}"),
        ProgressColumn("length", 7, lambda line: f"{line['completions/mean_length']:.1f}"),
        ProgressColumn("clipped", 6, lambda line: f"{line['completions/clipped_ratio']:.1%}"),
        ProgressColumn("tokens/s", 9, lambda line: f"{line['tokens_per_s']:,.0f}"),
    )
    summary: ClassVar = {
        "tokens": SummaryField("num_input_tokens", "sum"),
        "tokens_per_s": SummaryField("tokens_per_s", "mean"),
        "reward_first": SummaryField("reward", "first"),
        "reward_last": SummaryField("reward", "last"),
        "generate_s": SummaryField("generate_s", "sum"),
        "rollout_wait_s": SummaryField("rollout_wait_s", "sum"),
        "groups_claimed_from_other_ranks": SummaryField("groups_claimed_from_other_ranks", "sum"),
        "failed_rewards": SummaryField("failed_rewards", "sum"),
    }

    def __init__(
        self,
        config: Config,
        world: World,
        model: sharded.ShardedModel,
        prompts: PromptDataset,
        loader: PromptLoader,
        reward_functions: list[RewardFunction],
        engine: SampleFn = sample,
    ) -> None:
        self._rl, self._seed, self._world, self._model = config.rl, config.run.seed, world, model
        self._exact = config.run.exact
        self._max_tokens = config.data.max_tokens_per_microbatch
        self._prompts, self._loader, self._reward_functions, self._engine = prompts, loader, reward_functions, engine
        self._codec = PromptCodec(prompts)
        num_groups = config.data.minibatch_sequences // config.rl.num_generations
        self._tickets = Tickets(world)
        self._queue = WorkQueue(world, num_groups, config.rl.store_bytes)
        self._metrics = RolloutMetrics([reward.name for reward in reward_functions], num_groups)
        self.gathered_names = self._metrics.gathered_names
        self._length_predictor = CompletionLengthPredictor(prompts.lengths)
        self._step = 0  # its number
        self._note: Callable[[str], None] = world.set_status
        self.logged_completions: list[dict[str, Any]] = []

    def next_minibatch(self) -> Minibatch:
        """Return the next minibatch of prompts."""
        return next(self._loader)

    def on_step_begin(self, step: Step) -> None:
        """Start to count."""
        self._step = step.number
        self._metrics.reset()
        self.logged_completions = []

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield microbatches of completions, as described above. One-sided."""
        count = len(minibatch.indices)
        decode_batches = self._decode_batches(minibatch)
        for ticket in self._tickets.draw(len(decode_batches)):
            yield from self._pack(self._generate(minibatch, decode_batches[ticket]))
        while (state := self._queue.snapshot(count)).num_done < count:
            if state.published:
                yield from self._pack(self._claim(count, state))
            else:
                self._wait(count, state)

    def local_values(self) -> list[float]:
        """Return this rank's numbers."""
        return self._metrics.local_values()

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Report on all groups, remember how long they were, and make ready for the next minibatch."""
        step.metrics |= self._metrics.compute(gathered)
        for position, index in enumerate(step.minibatch.indices.tolist()):
            self._length_predictor.observe(index, self._metrics.mean_length(gathered, position))
        self._tickets.reset()
        self._queue.reset()

    def on_step_end(self, step: Step) -> None:
        """Report the speed."""
        step.metrics["tokens_per_s"] = step.metrics["num_input_tokens"] / step.metrics["step_s"]

    def state_dict(self) -> dict[str, Any]:
        """Return where the next minibatch begins, and how long completions were."""
        return {"loader": self._loader.state_dict(), "completion_lengths": self._length_predictor.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a minibatch."""
        self._loader.load_state_dict(state_dict["loader"])
        self._length_predictor.load_state_dict(state_dict["completion_lengths"])

    def _decode_batches(self, minibatch: Minibatch) -> list[list[int]]:
        """Return positions of prompts that are decoded together, those expected to be longest first."""
        count = len(minibatch.indices)
        expected = [self._length_predictor.predict(index) for index in minibatch.indices.tolist()]
        order = sorted(range(count), key=lambda i: (-expected[i], i))
        together = max(
            1, min(self._rl.max_concurrent_sequences // self._rl.num_generations, -(-count // self._world.size))
        )
        if self._exact:
            together = 1
        return [order[begin : begin + together] for begin in range(0, count, together)]

    def _generate(self, minibatch: Minibatch, positions: list[int]) -> list[RolloutGroup]:
        """Generate from prompts, and hand on what is finished; return the groups for which there is no room."""
        began = time.perf_counter()
        indices = [int(minibatch.indices[position]) for position in positions]
        records = [self._prompts[index] for index in indices]
        for position in positions:
            self._queue.mark_started(position)
        unpublished: list[RolloutGroup] = []

        def on_prompt_done(i: int, completions: PromptCompletions) -> None:
            group = self._score_group(positions[i], indices[i], records[i], completions)
            if group is not None and not self._queue.publish(group.position, group.to_bytes()):
                self._queue.mark_done(group.position)
                self._metrics.add("groups_not_stored")
                unpublished.append(group)

        prompts = [self._codec.encode(index, record) for index, record in zip(indices, records, strict=True)]
        rl = self._rl
        sampling = RolloutSamplingParams(
            rl.num_generations, rl.max_completion_length, rl.temperature, rl.top_p, rl.top_k, self._seed, self._step
        )
        with self._model.activity("generating") as self._note, unsharded_if_fits(self._model):
            self._engine(self._model.module, prompts, sampling, on_prompt_done, self._report_token)
        self._metrics.add("generate_s", time.perf_counter() - began)
        return unpublished

    def _report_token(self, token: int) -> None:
        self._note(f"generating, token {token:,} of {self._rl.max_completion_length:,}")

    def _score_group(
        self, position: int, index: int, record: PromptRecord, completions: PromptCompletions
    ) -> RolloutGroup | None:
        """Score a group; return it, or None if it is settled, as there is nothing to learn from it."""
        group_rewards = self._compute_rewards(index, record, completions)
        advantages = group_rewards.advantages(scaled=self._rl.scale_rewards == "group")
        excluded = np.array([self._rl.mask_truncated_completions and not stopped for stopped in completions.stopped])
        self._metrics.add_group(position, completions, group_rewards, excluded)
        self._log_completion(position, record, completions, group_rewards, advantages)
        if not self._rl.beta and not (advantages * ~excluded).any():
            self._queue.mark_done(position)
            return None
        return RolloutGroup(position, index, record.tokens, completions.tokens, completions.logps, advantages, excluded)

    def _compute_rewards(self, index: int, record: PromptRecord, completions: PromptCompletions) -> GroupRewards:
        reward_kwargs = self._codec.reward_kwargs(record, completions.tokens)
        limits = {"timeout_s": self._rl.reward_timeout_s, "skip": self._rl.skip_failed_rewards}
        self._note(f"computing rewards of prompt {index}")
        return compute_rewards(self._reward_functions, reward_kwargs, index, self._world.rank, **limits)  # type: ignore[arg-type]

    def _log_completion(
        self,
        position: int,
        record: PromptRecord,
        completions: PromptCompletions,
        group_rewards: GroupRewards,
        advantages: np.ndarray,
    ) -> None:
        """Keep completions of the first prompt of a step that is to be shown."""
        every = self._rl.log_completions
        if position or not every or self._step % every:
            return
        for i, tokens in enumerate(completions.tokens[:4]):
            rewards = {
                reward.name: _plain(group_rewards.per_function[n, i]) for n, reward in enumerate(self._reward_functions)
            }
            self.logged_completions.append(
                {
                    "step": self._step,
                    "prompt": record.prompt,
                    "completion": self._codec.decode(tokens),
                    "num_tokens": len(tokens),
                    "rewards": rewards,
                    "reward": _plain(group_rewards.rewards[i]),
                    "advantage": float(advantages[i]),
                }
            )

    def _pack(self, groups: list[RolloutGroup]) -> Iterator[Microbatch]:
        self._metrics.add("groups_trained", len(groups))
        for groups_of_microbatch in [[group] for group in groups] if self._exact else [groups]:
            yield from pack_microbatches(groups_of_microbatch, self._max_tokens, with_all=self._rl.beta > 0)

    def _claim(self, count: int, state: QueueState) -> list[RolloutGroup]:
        """Claim as many groups as fill a microbatch, and leave the other ranks theirs."""
        max_groups = 1 if self._exact else max(1, len(state.published) // self._world.size)
        groups: list[RolloutGroup] = []
        num_tokens = 0
        for _, owner, content in self._queue.claim(count):
            groups.append(RolloutGroup.from_bytes(content))
            self._metrics.add("groups_claimed_from_other_ranks", owner != self._world.rank)
            num_tokens += sum(len(groups[-1].prompt) + len(tokens) for tokens in groups[-1].completions)
            if len(groups) == max_groups or num_tokens >= self._max_tokens:
                break
        return groups

    def _wait(self, count: int, previous: QueueState) -> None:
        """Sleep until the board shows something else. The wait names the ranks that have groups in work."""
        began, sleep_s = time.perf_counter(), _SLEEP_S
        num_open = len(previous.in_progress) + previous.num_unclaimed
        self._world.set_status(f"waiting for {num_open} prompt groups that other ranks generate")
        with self._world.deadline(
            f"waiting for {num_open} prompt groups in work", sorted(set(previous.in_progress.values()))
        ):
            while self._queue.snapshot(count) == previous:
                self._world.progress.run_tasks()  # ranks that train may push to this one
                time.sleep(sleep_s)
                sleep_s = min(_MAX_SLEEP_S, 1.5 * sleep_s)
        self._metrics.add("rollout_wait_s", time.perf_counter() - began)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
