"""Source of microbatches of completions. Each rank generates completions, and then trains on groups from any rank.

A group consists of a prompt and its completions. A minibatch has these phases:

    generate             claim prompts, longest expected completions first, and decode them, claiming others when
                         completions have ended; publish each complete group with its advantages, or train on it
                         if the memory for groups is full                                             one-sided
    no prompts left      claim published groups from any rank, the largest first, and train on them   one-sided
    no groups published  generate for later steps (see below), or sleep until a group is published or
                         all groups are done                                                          one-sided
    gradients complete   gather the counts and sums of all groups                                     collective

With `rl.max_staleness`, the prompts of that many later steps can be claimed, too. Each step trains its own prompts, in
the order of the data, so completions are at most that many steps older than the step that trains them. Completions in
progress, with their keys and values, are kept while gradients are completed and parameters published, and then go on
with the new parameters.

In an exact run (`training.exact`), each group is decoded and trained separately, because shared batches would depend on
the speed of each rank and change the last bits of logits and gradients.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np

from odc_mpi.comm.work_queue import QueueState
from odc_mpi.data.groups import group_microbatches
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.data.prompt_group import Answer, PromptGroup
from odc_mpi.errors import warn
from odc_mpi.formatting import format_quantity
from odc_mpi.models.decoding import generation_mode, unsharded_if_fits
from odc_mpi.observe.callback import Step
from odc_mpi.rollout.decode import Decoder, prompt_batch
from odc_mpi.rollout.reward_pool import RewardPool
from odc_mpi.rollout.rewards import GroupRewards, RewardCaller
from odc_mpi.rollout.sampling import PromptCompletions, RolloutSamplingParams
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.context import RunContext
from odc_mpi.training.loop import MinibatchSource
from odc_mpi.training.recipes.rollouts.carried import require_carried
from odc_mpi.training.recipes.rollouts.completion_log import CompletionLog
from odc_mpi.training.recipes.rollouts.metrics import ROLLOUT_METRICS, RolloutMetrics
from odc_mpi.training.recipes.rollouts.prompts import PromptCodec, PromptLoader, longest_first, predict_lengths
from odc_mpi.training.recipes.rollouts.step_rollouts import RolloutWindows, StepRollouts

#: Fraction of truncated completions above which a warning is printed.
_MANY_CLIPPED = 0.9
#: Initial and maximum sleep between two polls of the queue, in seconds.
_SLEEP_S, _MAX_SLEEP_S = 0.5e-3, 5e-3
#: Tokens that a rank decodes for later steps before it looks for groups to train again.
_TOKENS_AHEAD = 8


class RolloutSource(MinibatchSource):
    """Source of microbatches whose completions are generated during training. Construction is collective.

    Every `rl.log_completions` steps, some completions are printed and written to completions.jsonl. If the model does
    not pack, each microbatch has one completion. `reward_names` are those of the reward functions in `rewards_of`.
    """

    metrics = (*ROLLOUT_METRICS, *MinibatchSource.metrics)

    def __init__(
        self, context: RunContext, reward_names: Sequence[str], rewards_of: RewardCaller, *, trains_all: bool
    ) -> None:
        config, world, inputs, model = context.config, context.world, context.inputs, context.model
        assert isinstance(inputs.loader, PromptLoader) and isinstance(inputs.dataset, PromptDataset)
        self._prompts, self._loader = inputs.dataset, inputs.loader
        self._rl, self._world, self._model = config.rl, world, model
        self._exact, self._packs = config.run.exact, inputs.model.packing.packs
        self._max_tokens, self._num_steps = config.data.max_tokens_per_microbatch, config.run.steps
        self._trains_all = trains_all
        self._codec = PromptCodec(inputs.dataset, config.model.path)
        rl = config.rl
        num_prompts, num_windows = config.data.minibatch_sequences // rl.num_generations, rl.max_staleness + 1
        self._rollout_windows = [
            RolloutWindows(world, num_prompts, rl.store_bytes // num_windows) for _ in range(num_windows)
        ]
        self._metrics = RolloutMetrics(reward_names, num_prompts, has_staleness=rl.max_staleness > 0)
        self.gathered_names = self._metrics.gathered_names
        self.metrics = tuple(each for metric in self.metrics for each in metric.expand(reward_names))
        #: Mean length in tokens of the completions last generated for each prompt, keyed by the prompt's index.
        self._observed_lengths: dict[int, float] = {}
        #: The current step, and the later steps whose prompts can be claimed.
        self._steps: deque[StepRollouts] = deque()
        self._note: Callable[[str], None] = world.set_status
        self._log = CompletionLog(world, config.run.dir, rl.log_completions, reward_names)
        self._warned = {"equal"} if rl.teacher_path else set()  # a teacher makes equal rewards harmless
        names = {field.name for field in fields(RolloutSamplingParams)} & vars(rl).keys()
        sampling = RolloutSamplingParams(seed=config.run.seed, **{name: getattr(rl, name) for name in names})
        self._num_prompts = num_prompts
        max_prompts = 1 if config.run.exact else max(1, rl.max_concurrent_sequences // rl.num_generations)
        self._batch = prompt_batch(model.module, sampling, max_prompts, self._submit_rewards)
        self._pool = RewardPool(rewards_of, rl.reward_workers)
        #: Completions whose rewards are being computed, keyed as in `_batch`.
        self._scoring: dict[int, PromptCompletions] = {}

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Check that there is memory for completions in progress, and report it. Collective with `rl.max_staleness`."""
        if not self._rl.max_staleness:
            return
        longest = int(self._prompts.lengths.max())
        num_bytes = require_carried(self._world, self._model, self._rl, longest, self._num_prompts)
        if self._world.rank == 0:
            again = "; those of the resumed run are generated again" if completed_steps else ""
            size = format_quantity("bytes", num_bytes)
            print(f"rl.max_staleness: completions in progress take up to {size} per rank{again}", flush=True)

    def next_minibatch(self) -> PlannedMinibatch:
        """Return the next minibatch of prompts from the loader."""
        return next(self._loader)

    def on_step_begin(self, step: Step) -> None:
        """Reset the metrics, and let ranks claim the prompts of this step and of `rl.max_staleness` later ones."""
        self._metrics.reset()
        if not self._steps:
            self._add_step(step.number, step.minibatch)
        ahead = self._steps[-1].number - step.number
        num_ahead = min(self._rl.max_staleness, self._num_steps - step.number)
        for i, minibatch in enumerate(self._loader.upcoming(num_ahead)[ahead:], self._steps[-1].number + 1):
            self._add_step(i, minibatch)
        for add in self._steps[0].metrics_to_add:
            add()

    def microbatches(self, minibatch: PlannedMinibatch) -> Iterator[Microbatch]:
        """Generate completions for this rank's prompts, and yield microbatches of completions to train on. One-sided.

        They may be from prompts of other ranks (see the module docstring).
        """
        step = self._steps[0]
        if self._batch.prompts and self._rl.stale_kv == "recompute" and isinstance(self._batch, Decoder):
            with self._generating():
                self._batch.recompute()
        while True:
            self._generate(step)
            yield from self._pack(step.take_unpublished())
            if not step.is_decoded_here:
                continue  # there was no room for more groups
            state = step.snapshot()
            if state.num_done == step.count:
                return
            if groups := self._claim(step, state):
                yield from self._pack(groups)
            elif not self._can_generate():
                self._wait(step, state)
                self._publish_scored()

    def local_values(self) -> list[float]:
        """Return this rank's values, in the order of `gathered_names`."""
        return list(self._metrics.values.values())

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics to the step, record completion lengths, and reset the tickets and the work queue. One-sided."""
        step.metrics |= self._metrics.compute(gathered)
        self._warn_once(step)
        for position, index in enumerate(step.minibatch.indices.tolist()):
            self._observed_lengths[index] = round(gathered.sum(f"length_{position}"), 2)
        self._windows_of(self._steps.popleft().number).reset()

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

    def close(self) -> None:
        """Drop rewards that are being computed."""
        self._pool.close()

    def on_step_end(self, step: Step) -> None:
        """Log the completions. Collective every `rl.log_completions` steps."""
        self._log.write(step.number)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and the observed completion lengths."""
        lengths = {str(index): length for index, length in self._observed_lengths.items()}
        return {"loader": self._loader.state_dict(), "completion_lengths": lengths}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loader's position and the observed completion lengths."""
        self._loader.load_state_dict(state_dict["loader"])
        lengths = state_dict["completion_lengths"]
        self._observed_lengths = {int(index): length for index, length in lengths.items()}

    def _windows_of(self, step: int) -> RolloutWindows:
        return self._rollout_windows[step % len(self._rollout_windows)]

    def _add_step(self, number: int, minibatch: PlannedMinibatch) -> None:
        expected = predict_lengths(minibatch.indices.tolist(), self._prompts.lengths, self._observed_lengths)
        self._steps.append(StepRollouts(number, minibatch, longest_first(expected), self._windows_of(number)))

    def _can_generate(self) -> bool:
        """Return True if this rank has completions in progress, or might claim prompts."""
        return bool(self._batch.prompts) or any(step.has_prompts for step in self._steps)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        began = time.perf_counter()
        with (
            self._model.spans.span("generate"),
            self._model.activity("generating") as self._note,
            unsharded_if_fits(self._model),
            generation_mode(self._model.module),
        ):
            yield
        self._metrics.add("generate_s", time.perf_counter() - began)

    def _generate(self, step: StepRollouts) -> None:
        """Generate until this rank has finished its prompts of `step`, and there may be groups to train.

        Stops earlier if groups that do not fit in the store fill a microbatch.
        """
        num_ahead = 0
        with self._generating() if self._can_generate() else nullcontext():
            while self._claim_prompts():
                self._batch.step(step.number, self._report_token)
                self._publish_scored()
                if sum(group.num_tokens for group in step.unpublished) >= self._max_tokens:
                    return
                if step.is_decoded_here:
                    num_ahead += 1
                    if num_ahead % _TOKENS_AHEAD == 0 and (
                        (state := step.snapshot()).published or state.num_done == step.count
                    ):
                        return

    def _claim_prompts(self) -> bool:
        """Claim prompts of this step and of later ones if there is room. Return False if none are in progress."""
        for step in self._steps:
            if num_free := self._batch.num_free:
                positions = step.claim_prompts(num_free)
                records = {position: self._prompts[int(step.minibatch.indices[position])] for position in positions}
                prompts = {
                    step.number * self._num_prompts + position: self._codec.encode(
                        int(step.minibatch.indices[position]), record
                    )
                    for position, record in records.items()
                }
                if prompts:
                    self._batch.add(prompts, step.number)
        return bool(self._batch.prompts)

    def _report_token(self, token: int) -> None:
        self._note(f"generating, token {token:,} of {self._rl.max_completion_length:,}")
        self._world.progress.poke()  # without a progress thread, as no fetch does it while all units are unsharded

    def _submit_rewards(self, key: int, completions: PromptCompletions) -> None:
        """Start computing the rewards of a prompt's completions."""
        step, position = self._step_of(key)
        step.num_decoding -= 1
        index = int(step.minibatch.indices[position])
        self._note(f"computing rewards of prompt {index}")
        self._scoring[key] = completions
        self._pool.submit(key, self._codec.reward_kwargs(self._prompts[index], completions.tokens), index)

    def _publish_scored(self) -> None:
        """Publish the groups whose rewards have been computed."""
        for key, group_rewards in self._pool.finished():
            step, position = self._step_of(key)
            group = self._score_group(step, position, self._scoring.pop(key), group_rewards)
            if not step.finish(position, group):
                self._count(step, lambda: self._metrics.add("groups_not_stored"))

    def _step_of(self, key: int) -> tuple[StepRollouts, int]:
        number, position = divmod(key, self._num_prompts)
        return self._steps[number - self._steps[0].number], position

    def _count(self, step: StepRollouts, add: Callable[[], None]) -> None:
        """Call `add` to add values to the metrics of `step`, now or when that step begins."""
        if step is self._steps[0]:
            add()
        else:
            step.metrics_to_add.append(add)

    def _score_group(
        self, step: StepRollouts, position: int, completions: PromptCompletions, group_rewards: GroupRewards
    ) -> PromptGroup | None:
        """Return a group without answers that have no gradient, or None if all have none."""
        index = int(step.minibatch.indices[position])
        record = self._prompts[index]
        advantages = group_rewards.advantages(scaled=self._rl.scale_rewards == "group")
        excluded = np.array([self._rl.mask_truncated_completions and not stopped for stopped in completions.stopped])
        self._count(step, lambda: self._metrics.add_group(step.number, position, completions, group_rewards, excluded))
        if position == 0:
            self._log.add(step.number, record, completions, group_rewards, advantages, self._codec.decode)
        answers = []
        for i in np.flatnonzero(~excluded & ((advantages != 0) | self._trains_all)):
            tokens = np.array(completions.tokens[i], np.uint32)
            columns = {"logps": completions.logps[i], "advantage": advantages[i]}
            answers.append(Answer(tokens, np.ones(len(tokens), np.bool_), columns))
        return PromptGroup(index, np.array(record.tokens, np.uint32), answers) if answers else None

    def _pack(self, groups: list[PromptGroup]) -> Iterator[Microbatch]:
        self._metrics.add("groups_trained", len(groups))
        for groups_of_microbatch in [[group] for group in groups] if self._exact else [groups]:
            for microbatch in group_microbatches(groups_of_microbatch, self._max_tokens, packs=self._packs):
                self._metrics.add("trained_tokens", microbatch.num_tokens)
                yield microbatch

    def _claim(self, step: StepRollouts, state: QueueState) -> list[PromptGroup]:
        """Claim groups until a microbatch is full, but no more than an even share of the published groups."""
        max_groups = 1 if self._exact else max(1, len(state.published) // self._world.size)
        groups: list[PromptGroup] = []
        num_tokens = 0
        for owner, group in step.claim_groups(state):
            groups.append(group)
            self._metrics.add("groups_claimed_from_other_ranks", owner != self._world.rank)
            num_tokens += group.num_tokens
            if len(groups) == max_groups or num_tokens >= self._max_tokens:
                break
        return groups

    def _wait(self, step: StepRollouts, previous: QueueState) -> None:
        """Sleep until the state of the queue changes, or rewards are computed, which have limits of their own.

        The timeout message lists the ranks that are generating.
        """
        began = time.perf_counter()
        if self._pool.num_pending:
            self._world.set_status(f"computing rewards of {self._pool.num_pending} prompts")
            while not self._pool.wait(_MAX_SLEEP_S) and not step.has_changed(previous):
                self._world.progress.run_tasks()
        else:
            self._wait_for_ranks(step, previous)
        self._metrics.add("rollout_wait_s", time.perf_counter() - began)
        self._model.spans.add("rollout_wait", began)

    def _wait_for_ranks(self, step: StepRollouts, previous: QueueState) -> None:
        num_open, sleep_s = len(previous.in_progress) + previous.num_not_started, _SLEEP_S
        self._world.set_status(f"waiting for {num_open} prompt groups that other ranks generate")
        with self._world.deadline(
            f"waiting for {num_open} prompt groups in progress", sorted(set(previous.in_progress.values()))
        ):
            while not step.has_changed(previous):
                self._world.progress.run_tasks()  # other ranks may push gradients to this one
                time.sleep(sleep_s)
                sleep_s = min(_MAX_SLEEP_S, 1.5 * sleep_s)
