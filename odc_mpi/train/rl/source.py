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

from odc_mpi.comm.exchange import Exchange, Look
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.data.prompts import PromptRow, Prompts
from odc_mpi.models.decoding import on_this_rank
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.observe.participant import Step
from odc_mpi.rollout.groups import RolloutGroup, batches
from odc_mpi.rollout.rewards import Reward, Scored, score
from odc_mpi.rollout.sample import Completions, GroupSampling, Sample, sample
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.train.loop import Source
from odc_mpi.train.rl.lengths import ExpectedLengths
from odc_mpi.train.rl.prompts import PromptLoader, PromptText
from odc_mpi.train.rl.tally import Tally
from odc_mpi.train.settings import Config

#: Sleep between two looks for finished groups, at first and at most.
_SLEEP_S, _MAX_SLEEP_S = 0.5e-3, 5e-3


class RolloutSource(Source):
    """Prompts, generated from and trained on within one minibatch. Making one is collective.

    Args:
        engine: What generates.

    Attributes:
        shown: Of the last step, if completions of it are to be shown: those that this rank generated, for people.
    """

    columns: ClassVar = (
        Column("reward", 8, lambda line: "-" if line["reward"] is None else f"{line['reward']:.4f}"),
        Column("length", 7, lambda line: f"{line['completions/mean_length']:.1f}"),
        Column("cut", 6, lambda line: f"{line['completions/clipped_ratio']:.1%}"),
        Column("tokens/s", 9, lambda line: f"{line['tokens_per_s']:,.0f}"),
    )
    summary: ClassVar = {
        "tokens": Entry("num_input_tokens", "sum"),
        "tokens_per_s": Entry("tokens_per_s", "mean"),
        "reward_first": Entry("reward", "first"),
        "reward_last": Entry("reward", "last"),
        "generate_s": Entry("generate_s", "sum"),
        "rollout_wait_s": Entry("rollout_wait_s", "sum"),
        "groups_from_others": Entry("groups_from_others", "sum"),
        "failed_rewards": Entry("failed_rewards", "sum"),
    }

    def __init__(
        self,
        config: Config,
        world: World,
        model: sharded.ShardedModel,
        prompts: Prompts,
        loader: PromptLoader,
        rewards: list[Reward],
        engine: Sample = sample,
    ) -> None:
        self._rl, self._seed, self._world, self._model = config.rl, config.run.seed, world, model
        self._exact = config.run.exact
        self._max_tokens = config.data.max_tokens_per_microbatch
        self._prompts, self._loader, self._rewards, self._engine = prompts, loader, rewards, engine
        self._text = PromptText(prompts)
        num_groups = config.data.minibatch_sequences // config.rl.num_generations
        self._tickets = Tickets(world)
        self._exchange = Exchange(world, num_groups, config.rl.store_bytes)
        self._tally = Tally([reward.name for reward in rewards], num_groups)
        self.names = self._tally.names
        self._lengths = ExpectedLengths(prompts.lengths)
        self._step = 0  # its number
        self._note: Callable[[str], None] = world.note
        self.shown: list[dict[str, Any]] = []

    def draw(self) -> Minibatch:
        """Return the next minibatch of prompts. Local."""
        return next(self._loader)

    def begin(self, step: Step) -> None:
        """Start to count. Local."""
        self._step = step.number
        self._tally.begin()
        self.shown = []

    def microbatches(self, minibatch: Minibatch) -> Iterator[Batch]:
        """Yield microbatches of completions, as described above. One-sided."""
        count = len(minibatch.indices)
        decoded = self._decode_batches(minibatch)
        for ticket in self._tickets.draw(len(decoded)):
            yield from self._batches(self._generate(minibatch, decoded[ticket]))
        while (look := self._exchange.look(count)).num_done < count:
            if look.offered:
                yield from self._batches(self._claim(count, look))
            else:
                self._wait(count, look)

    def tell(self) -> list[float]:
        """Return this rank's numbers. Local."""
        return self._tally.tell()

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Report on all groups, remember how long they were, and make ready for the next minibatch. Local."""
        step.metrics |= self._tally.report(told)
        for position, index in enumerate(step.minibatch.indices.tolist()):
            self._lengths.learn(index, self._tally.length(told, position))
        self._tickets.reset()
        self._exchange.reset()

    def after_step(self, step: Step) -> None:
        """Report the speed. Local."""
        step.metrics["tokens_per_s"] = step.metrics["num_input_tokens"] / step.metrics["step_s"]

    def state(self) -> dict[str, Any]:
        """Return where the next minibatch begins, and how long completions were. Local."""
        return {"loader": self._loader.state_dict(), "completion_lengths": self._lengths.state()}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Go on at a minibatch. Local."""
        self._loader.load_state_dict(about["loader"])
        self._lengths.load_state(about["completion_lengths"])

    def _decode_batches(self, minibatch: Minibatch) -> list[list[int]]:
        """Return positions of prompts that are decoded together, those expected to be longest first."""
        count = len(minibatch.indices)
        expected = [self._lengths.of(index) for index in minibatch.indices.tolist()]
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
        rows = [self._prompts[index] for index in indices]
        for position in positions:
            self._exchange.begin(position)
        kept: list[RolloutGroup] = []

        def deliver(i: int, completions: Completions) -> None:
            group = self._finish(positions[i], indices[i], rows[i], completions)
            if group is not None and not self._exchange.offer(group.position, group.to_bytes()):
                self._exchange.settle(group.position)
                self._tally.add("groups_kept")
                kept.append(group)

        prompts = [self._text.tokens(index, row) for index, row in zip(indices, rows, strict=True)]
        rl = self._rl
        sampling = GroupSampling(
            rl.num_generations, rl.max_completion_length, rl.temperature, rl.top_p, rl.top_k, self._seed, self._step
        )
        with self._model.doing("generating") as self._note, on_this_rank(self._model):
            self._engine(self._model.module, prompts, sampling, deliver, self._tell_token)
        self._tally.add("generate_s", time.perf_counter() - began)
        return kept

    def _tell_token(self, token: int) -> None:
        self._note(f"generating, token {token:,} of {self._rl.max_completion_length:,}")

    def _finish(self, position: int, index: int, row: PromptRow, found: Completions) -> RolloutGroup | None:
        """Score a group; return it, or None if it is settled, as there is nothing to learn from it."""
        scored = self._score(index, row, found)
        advantages = scored.advantages(scaled=self._rl.scale_rewards == "group")
        masked = np.array([self._rl.mask_truncated_completions and not stopped for stopped in found.stopped])
        self._tally.add_group(position, found, scored, masked)
        self._show(position, row, found, scored, advantages)
        if not self._rl.beta and not (advantages * ~masked).any():
            self._exchange.settle(position)
            return None
        return RolloutGroup(position, index, row.tokens, found.tokens, found.logps, advantages, masked)

    def _score(self, index: int, row: PromptRow, found: Completions) -> Scored:
        arguments = self._text.arguments(row, found.tokens)
        limits = {"timeout_s": self._rl.reward_timeout_s, "skip": self._rl.skip_failed_rewards}
        self._note(f"computing rewards of prompt {index}")
        return score(self._rewards, arguments, index, self._world.rank, **limits)  # type: ignore[arg-type]

    def _show(self, position: int, row: PromptRow, found: Completions, scored: Scored, advantages: np.ndarray) -> None:
        """Keep completions of the first prompt of a step that is to be shown."""
        every = self._rl.log_completions
        if position or not every or self._step % every:
            return
        for i, tokens in enumerate(found.tokens[:4]):
            each = {reward.name: _plain(scored.each[n, i]) for n, reward in enumerate(self._rewards)}
            self.shown.append(
                {
                    "step": self._step,
                    "prompt": row.prompt,
                    "completion": self._text.text(tokens),
                    "num_tokens": len(tokens),
                    "rewards": each,
                    "reward": _plain(scored.total[i]),
                    "advantage": float(advantages[i]),
                }
            )

    def _batches(self, groups: list[RolloutGroup]) -> Iterator[Batch]:
        self._tally.add("groups_trained", len(groups))
        for packed in [[group] for group in groups] if self._exact else [groups]:
            yield from batches(packed, self._max_tokens, with_all=self._rl.beta > 0)

    def _claim(self, count: int, look: Look) -> list[RolloutGroup]:
        """Claim as many groups as fill a microbatch, and leave the other ranks theirs."""
        most = 1 if self._exact else max(1, len(look.offered) // self._world.size)
        groups: list[RolloutGroup] = []
        num_tokens = 0
        for _, owner, content in self._exchange.claim(count):
            groups.append(RolloutGroup.from_bytes(content))
            self._tally.add("groups_from_others", owner != self._world.rank)
            num_tokens += sum(len(groups[-1].prompt) + len(tokens) for tokens in groups[-1].completions)
            if len(groups) == most or num_tokens >= self._max_tokens:
                break
        return groups

    def _wait(self, count: int, before: Look) -> None:
        """Sleep until the board shows something else. The wait names the ranks that have groups in work."""
        began, sleep_s = time.perf_counter(), _SLEEP_S
        num_open = len(before.open) + before.num_unseen
        self._world.note(f"waiting for {num_open} prompt groups that other ranks generate")
        with self._world.deadline(f"waiting for {num_open} prompt groups in work", sorted(set(before.open.values()))):
            while self._exchange.look(count) == before:
                self._world.progress.serve()  # ranks that train may push to this one
                time.sleep(sleep_s)
                sleep_s = min(_MAX_SLEEP_S, 1.5 * sleep_s)
        self._tally.add("rollout_wait_s", time.perf_counter() - began)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
