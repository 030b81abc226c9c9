"""Source of microbatches for GRPO. Each rank generates completions, and then trains on groups from any rank.

A group consists of a prompt and its completions. A minibatch has these phases:

    claim prompts        claim the next batch of prompts, longest expected completions first          one-sided
    generate             publish each complete group with its advantages, or train on it if the
                         memory for groups is full                                                    one-sided
    no prompts left      claim published groups from any rank, the largest first, and train on them   one-sided
    no groups published  sleep until a group is published or all groups are done                      one-sided
    gradients complete   gather the counts and sums of all groups                                     collective

In an exact run (`training.exact`), each group is decoded and trained separately, because shared batches would depend on
the speed of each rank and change the last bits of logits and gradients.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.work_queue import QueueState, WorkQueue
from odc_mpi.data.groups import Answer, PromptGroup, group_microbatches
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.prompt_dataset import PromptDataset, PromptRecord
from odc_mpi.errors import warn
from odc_mpi.files import warn_write_failed
from odc_mpi.formatting import truncate_text
from odc_mpi.models.decoding import unsharded_if_fits
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.observe.callback import Step
from odc_mpi.rollout.rewards import GroupRewards
from odc_mpi.rollout.sample import PromptCompletions, RolloutSamplingParams, sample
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.loop import MinibatchSource
from odc_mpi.training.recipes.rollouts.metrics import ROLLOUT_METRICS, RolloutMetrics
from odc_mpi.training.recipes.rollouts.prompts import (
    PromptCodec,
    PromptLoader,
    RewardsFn,
    longest_first_batches,
    predict_lengths,
)
from odc_mpi.training.rundir.records import COMPLETIONS

#: Fraction of truncated completions above which a warning is printed.
_MANY_CLIPPED = 0.9
#: Initial and maximum sleep between two polls of the queue, in seconds.
_SLEEP_S, _MAX_SLEEP_S = 0.5e-3, 5e-3


class RolloutSource(MinibatchSource):
    """Source of microbatches whose completions are generated in the same step. Construction is collective.

    Every `rl.log_completions` steps, some completions are printed and written to completions.jsonl. If the model does
    not pack, each microbatch has one completion. `reward_names` are those of the reward functions in `rewards_of`.
    """

    metrics = (*ROLLOUT_METRICS, *MinibatchSource.metrics)

    def __init__(
        self,
        context: RunContext,
        model: ShardedModel,
        reward_names: Sequence[str],
        rewards_of: RewardsFn,
    ) -> None:
        config, world, inputs = context.config, context.world, context.inputs
        assert isinstance(inputs.loader, PromptLoader) and isinstance(inputs.dataset, PromptDataset)
        self._prompts, self._loader = inputs.dataset, inputs.loader
        self._rl, self._seed, self._world, self._model = config.rl, config.run.seed, world, model
        self._exact, self._packs = config.run.exact, inputs.model.packing.packs
        self._max_tokens = config.data.max_tokens_per_microbatch
        self._reward_names, self._rewards_of = reward_names, rewards_of
        self._codec = PromptCodec(inputs.dataset, config.model.path)
        num_groups = config.data.minibatch_sequences // config.rl.num_generations
        self._tickets = Tickets(world)
        self._queue = WorkQueue(world, num_groups, config.rl.store_bytes)
        self._metrics = RolloutMetrics(reward_names, num_groups)
        self.gathered_names = self._metrics.gathered_names
        self.metrics = tuple(each for metric in self.metrics for each in metric.expand(reward_names))
        #: Mean length in tokens of the completions last generated for each prompt, keyed by the prompt's index.
        self._observed_lengths: dict[int, float] = {}
        self._step = 0  # number of the current step
        self._note: Callable[[str], None] = world.set_status
        #: Completions to log that this rank generated in the current step.
        self._logged_completions: list[dict[str, Any]] = []
        self._log_path = Path(config.run.dir) / COMPLETIONS
        self._warned: set[str] = set()

    def next_minibatch(self) -> PlannedMinibatch:
        """Return the next minibatch of prompts from the loader."""
        return next(self._loader)

    def on_step_begin(self, step: Step) -> None:
        """Reset the metrics and discard the completions logged in the previous step."""
        self._step = step.number
        self._metrics.reset()
        self._logged_completions = []

    def microbatches(self, minibatch: PlannedMinibatch) -> Iterator[Microbatch]:
        """Generate completions for this rank's prompts, and yield microbatches of completions to train on. One-sided.

        They may be from prompts of other ranks (see the module docstring).
        """
        count = len(minibatch.indices)
        expected = predict_lengths(minibatch.indices.tolist(), self._prompts.lengths, self._observed_lengths)
        alone = self._exact or not decodes_batches(self._model.module)
        max_prompts = 1 if alone else self._rl.max_concurrent_sequences // self._rl.num_generations
        decode_batches = longest_first_batches(expected, self._world.size, max_prompts)
        for ticket in self._tickets.draw(len(decode_batches)):
            yield from self._pack(self._generate(minibatch, decode_batches[ticket]))
        while (state := self._queue.snapshot(count)).num_done < count:
            if groups := self._claim(state):
                yield from self._pack(groups)
            else:
                self._wait(state)

    def local_values(self) -> list[float]:
        """Return this rank's values, in the order of `gathered_names`."""
        return list(self._metrics.values.values())

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics to the step, record completion lengths, and reset the tickets and the work queue. One-sided."""
        step.metrics |= self._metrics.compute(gathered)
        self._warn_once(step)
        for position, index in enumerate(step.minibatch.indices.tolist()):
            self._observed_lengths[index] = round(gathered.sum(f"length_{position}"), 2)
        self._tickets.reset()
        self._queue.reset()

    def _warn_once(self, step: Step) -> None:
        warnings = {}
        if step.metrics["frac_reward_zero_std"] == 1:
            end = self._prompts.tokenizer.decode(self._prompts[int(step.minibatch.indices[0])].tokens[-20:])
            warnings["equal"] = (
                "the rewards of each prompt's completions are all equal, so this step trains nothing: check "
                "rl.reward_funcs (rl.log_completions 1 shows completions, each of which begins after the end of its "
                f"prompt, such as {end!r}), or raise rl.temperature"
            )
        if step.metrics["completions/clipped_ratio"] > _MANY_CLIPPED:
            warnings["clipped"] = (
                f"{step.metrics['completions/clipped_ratio']:.0%} of the completions were truncated: raise "
                "rl.max_completion_length, or check the end-of-sequence token of rl.tokenizer"
            )
        if self._world.rank == 0:
            for key in warnings.keys() - self._warned:
                warn(f"WARNING: step {step.number}: {warnings[key]}")
        self._warned |= warnings.keys()

    def on_step_end(self, step: Step) -> None:
        """Add tokens per second to the metrics. Collective every `rl.log_completions` steps, to log completions."""
        step.metrics["tokens_per_s"] = step.metrics["num_input_tokens"] / step.metrics["step_s"]
        if self._is_logged_step():
            lines = list(itertools.chain.from_iterable(self._world.gather_objects(self._logged_completions)))
            if self._world.rank == 0:
                self._log(lines)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and the observed completion lengths."""
        lengths = {str(index): length for index, length in self._observed_lengths.items()}
        return {"loader": self._loader.state_dict(), "completion_lengths": lengths}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loader's position and the observed completion lengths."""
        self._loader.load_state_dict(state_dict["loader"])
        lengths = state_dict["completion_lengths"]
        self._observed_lengths = {int(index): length for index, length in lengths.items()}

    def _generate(self, minibatch: PlannedMinibatch, positions: list[int]) -> list[PromptGroup]:
        """Generate completions and publish finished groups. Return the groups that do not fit in the store."""
        began = time.perf_counter()
        indices = [int(minibatch.indices[position]) for position in positions]
        records = [self._prompts[index] for index in indices]
        for position in positions:
            self._queue.mark_started(position)
        unpublished: list[PromptGroup] = []

        def on_prompt_done(i: int, completions: PromptCompletions) -> None:
            group = self._score_group(positions[i], indices[i], records[i], completions)
            if group is not None and not self._queue.publish(positions[i], group.to_bytes()):
                self._queue.mark_done(positions[i])
                self._metrics.add("groups_not_stored")
                unpublished.append(group)

        prompts = [self._codec.encode(index, record) for index, record in zip(indices, records, strict=True)]
        rl = self._rl
        sampling = RolloutSamplingParams(
            rl.num_generations, rl.max_completion_length, rl.temperature, rl.top_p, rl.top_k, self._seed, self._step
        )
        with (
            self._model.spans.span("generate"),
            self._model.activity("generating") as self._note,
            unsharded_if_fits(self._model),
        ):
            sample(self._model.module, prompts, sampling, on_prompt_done, self._report_token)
        self._metrics.add("generate_s", time.perf_counter() - began)
        return unpublished

    def _report_token(self, token: int) -> None:
        self._note(f"generating, token {token:,} of {self._rl.max_completion_length:,}")
        self._world.progress.poke()  # without a progress thread, as no fetch does it while all units are unsharded

    def _score_group(
        self, position: int, index: int, record: PromptRecord, completions: PromptCompletions
    ) -> PromptGroup | None:
        """Compute the rewards of a group and return it. Answers without a gradient are omitted.

        If no answer has a gradient, mark the group done and return None.
        """
        self._note(f"computing rewards of prompt {index}")
        group_rewards = self._rewards_of(self._codec.reward_kwargs(record, completions.tokens), index)
        advantages = group_rewards.advantages(scaled=self._rl.scale_rewards == "group")
        excluded = np.array([self._rl.mask_truncated_completions and not stopped for stopped in completions.stopped])
        self._metrics.add_group(position, completions, group_rewards, excluded)
        if position == 0 and self._is_logged_step():
            self._logged_completions = self._log_lines(record, completions, group_rewards, advantages)
        answers = []
        for i in np.flatnonzero(~excluded & ((advantages != 0) | (self._rl.beta > 0))):
            tokens = np.array(completions.tokens[i], np.uint32)
            columns = {"logps": completions.logps[i], "advantage": advantages[i]}
            answers.append(Answer(tokens, np.ones(len(tokens), np.bool_), columns))
        if not answers:
            self._queue.mark_done(position)
            return None
        return PromptGroup(index, np.array(record.tokens, np.uint32), answers)

    def _log_lines(
        self, record: PromptRecord, completions: PromptCompletions, group_rewards: GroupRewards, advantages: np.ndarray
    ) -> list[dict[str, Any]]:
        """Return the lines of completions.jsonl for up to 4 completions of a prompt."""
        return [
            {
                "step": self._step,
                "prompt": record.prompt,
                "completion": self._codec.decode(tokens),
                "num_tokens": len(tokens),
                "rewards": dict(zip(self._reward_names, map(_plain, group_rewards.per_function[:, i]), strict=True)),
                "reward": _plain(group_rewards.rewards[i]),
                "advantage": float(advantages[i]),
            }
            for i, tokens in enumerate(completions.tokens[:4])
        ]

    def _is_logged_step(self) -> bool:
        return bool(self._rl.log_completions) and self._step % self._rl.log_completions == 0

    def _log(self, lines: list[dict[str, Any]]) -> None:
        try:
            with self._log_path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            warn_write_failed(self._log_path, error)
        for line in lines[:2]:
            prompt, completion = (
                truncate_text(json.dumps(line[key], ensure_ascii=False), 120) for key in ("prompt", "completion")
            )
            print(f"  {prompt} -> {completion}  reward {line['reward']}", flush=True)

    def _pack(self, groups: list[PromptGroup]) -> Iterator[Microbatch]:
        self._metrics.add("groups_trained", len(groups))
        for groups_of_microbatch in [[group] for group in groups] if self._exact else [groups]:
            for microbatch in group_microbatches(groups_of_microbatch, self._max_tokens, packs=self._packs):
                self._metrics.add("trained_tokens", microbatch.num_tokens)
                yield microbatch

    def _claim(self, state: QueueState) -> list[PromptGroup]:
        """Claim groups until a microbatch is full, but no more than an even share of the published groups."""
        max_groups = 1 if self._exact else max(1, len(state.published) // self._world.size)
        groups: list[PromptGroup] = []
        num_tokens = 0
        for _, owner, content in self._queue.claim(state.published):
            groups.append(PromptGroup.from_bytes(content))
            self._metrics.add("groups_claimed_from_other_ranks", owner != self._world.rank)
            num_tokens += groups[-1].num_tokens
            if len(groups) == max_groups or num_tokens >= self._max_tokens:
                break
        return groups

    def _wait(self, previous: QueueState) -> None:
        """Sleep until the state of the queue changes. The timeout message lists the ranks that are generating."""
        began, sleep_s = time.perf_counter(), _SLEEP_S
        num_open = len(previous.in_progress) + previous.num_not_started
        self._world.set_status(f"waiting for {num_open} prompt groups that other ranks generate")
        with self._world.deadline(
            f"waiting for {num_open} prompt groups in progress", sorted(set(previous.in_progress.values()))
        ):
            while not self._queue.has_changed(previous):
                self._world.progress.run_tasks()  # other ranks may push gradients to this one
                time.sleep(sleep_s)
                sleep_s = min(_MAX_SLEEP_S, 1.5 * sleep_s)
        self._metrics.add("rollout_wait_s", time.perf_counter() - began)
        self._model.spans.add("rollout_wait", began)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
