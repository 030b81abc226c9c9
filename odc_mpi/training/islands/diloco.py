"""DiLoCo: islands train apart, and merge fragments of their parameters every few steps.

    send     encode the difference of a fragment, and show it to the other islands                does not wait
    apply    wait for the differences of all islands or of a quorum, compare their norms, update
             the outer parameters with the mean difference, and continue training from them       waits for islands

An island that a quorum has left out takes the outer parameters of another one, and keeps its difference from its own
former ones for its next merge.

Merges are numbered from 1. With F fragments, merge n is one of fragment (n - 1) mod F.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from typing_extensions import override

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.merges import FragmentExchange, Header, MergeResult, merge_results
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.errors import UserError, warn
from odc_mpi.islands.contributions import Contributions
from odc_mpi.islands.encoding import make_encoding
from odc_mpi.islands.fragments import Schedule, make_fragments
from odc_mpi.islands.norms import ChangeRule
from odc_mpi.islands.outer_optimizer import OuterOptimizer
from odc_mpi.islands.quorum import Quorum
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import Metric
from odc_mpi.observe.timing import IslandMetrics
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.settings import check_schedule
from odc_mpi.training.stop import StopRequest


class DiLoCo(Callback):
    """Merges the models of islands that train apart (DiLoCo and Streaming DiLoCo, docs/islands.md).

    Construction is collective over all islands. Each island shards a model of its own over its ranks. Between each step
    of the optimizer and `model.publish()`, call `step`, and after the last one also `finish`. As a callback, it makes
    these calls itself. Islands may take steps at different speeds and in different numbers: they wait for each other
    only when they apply a fragment.

    Args:
        islands: At least two islands.
        model: Model that is sharded over `islands.island`. Its initial parameters must be the same on all islands.
        sync_every: Number of steps in which each fragment is merged once. Must be a multiple of `fragments`.
        fragments: Number of parts of the parameters that are merged at different steps.
        delay: Steps between sending a fragment and applying the result. Must be less than `sync_every / fragments`.
        local_share: After a merge, islands continue from `local_share * local + (1 - local_share) * outer`.
        learning_rate: Learning rate of the outer optimizer, which is SGD with Nesterov momentum.
        momentum: Momentum of the outer optimizer, or 0 for none.
        wire: Encoding of the differences: "float32", "bfloat16", "int8", "e3m0" or "topk".
        topk: Share of the elements of a difference that "topk" sends, above 0.
        error_feedback: True to add the encoding's rounding errors to the fragment's next difference.
        norm_limit: A difference is left out if its norm exceeds this multiple of the usual norm. If this is 0, only
            non-finite differences are left out.
        quorum: Rule for merges that do not wait for all islands, or None to wait.
        rule: Rule that also asks for a merge of all fragments when the island's gradient norm changes, or None.
        num_steps: For the callback: number of steps after which it calls `finish`.
        stop: For the callback: request to stop. If it reaches a rank, all islands merge all fragments, and stop.
        checkpoint_every: For the callback: number of steps after which a checkpoint is due, or 0. With a quorum, all
            islands of a merge save one if it is due on any of them.

    Raises:
        UserError: There is only one island, the model's slices are not fp32, or the combination of `sync_every`,
            `fragments` and `delay` is invalid.

    Attributes:
        num_merges: Number of completed merges.
    """

    gathered_names = ("requested_merge",)
    metrics = (
        Metric("outer_norm", "norm of the mean difference, in steps in which islands that train apart merged"),
        Metric("outer_cosine", "likewise the mean cosine between the differences of two islands"),
        Metric("contributions_left_out", "differences of islands that were left out", summary="sum"),
        Metric("late_islands", "islands that were late for merges", summary="sum"),
        Metric("lag", "merges for which this island was late before the one in this step", summary="sum"),
        *IslandMetrics.metrics,
    )

    def __init__(
        self,
        islands: Islands,
        model: ShardedModel,
        *,
        sync_every: int = 30,
        fragments: int = 1,
        delay: int = 0,
        local_share: float = 0.0,
        learning_rate: float = 0.7,
        momentum: float = 0.5,
        wire: str = "float32",
        topk: float = 0.03,
        error_feedback: bool = False,
        norm_limit: float = 10.0,
        quorum: Quorum | None = None,
        rule: ChangeRule | None = None,
        num_steps: int | None = None,
        stop: StopRequest | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        if islands.size == 1:
            raise UserError("islands: expected two or more, got 1: train without DiLoCo")
        check_schedule(sync_every, fragments, delay)
        if any(each.dtype != torch.float32 for each in model.shard_parameters()):
            raise UserError("DiLoCo requires float32 slices, got float64: shard the model with param_dtype float32")
        self._islands, self._model, self._rule, self._last_step, self._stop = islands, model, rule, num_steps, stop
        self._schedule = Schedule(sync_every, fragments, delay)
        slices = [each for each, _ in model.slices() if each.spec.requires_grad]
        self._names = [each.spec.name for each in slices]
        self._optimizer = OuterOptimizer(
            model.shard_parameters(),
            make_fragments([(each.spec.numel, each.start, each.stop) for each in slices], fragments),
            make_encoding(wire, topk),
            learning_rate=learning_rate,
            momentum=momentum,
            local_share=local_share,
            error_feedback=error_feedback,
        )
        self._exchange = FragmentExchange(islands, self._optimizer, norm_limit, quorum, self._progress)
        self._num_steps = self._num_sent = self.num_merges = 0
        self._contributions, self._taken = Contributions(fragments), (0.0, 0, 0)
        # Merge up to which to merge without further training: as this island wants, and as all islands agreed.
        self._wanted = self._agreed = 0
        self._num_finished, self._has_finished = 0, False
        self._quorum, self._checkpoint_every = quorum, checkpoint_every
        self._members = list(range(islands.size))  # of the latest merge
        # Number of the current step, and whether it is to be saved. The clock is the number of steps of the island that
        # has taken most, as of the latest merge, and as of the latest one after which checkpoints were saved.
        self._step_number, self._saves, self._clock, self._saved_clock = 0, False, 0, 0
        self._were_late: set[int] = set()
        self._continues = False  # from a checkpoint of as many islands

    def step(self, amount: float) -> MergeResult | None:
        """Send and apply the fragments that are due after a step. Waits for other islands only to apply a fragment.

        Collective over the island.

        Args:
            amount: Number of loss tokens or pairs on which this island has trained in this step. The islands'
                differences are weighted by the sums of these numbers since the fragment was last sent.

        Returns:
            The result of all merges after this step that contain this island, or None if there were none to which an
            island contributed.

        Raises:
            TrainingError: The same island was left out three times in a row, or outer parameters differ between
                islands. All ranks raise this error.
        """
        self._num_steps += 1
        self._contributions.add_step(amount)
        self._agreed, results, at_once = 0, [], self._wanted > self.num_merges
        self._exchange.window.serve()
        if self._is_in_flight:
            self._exchange.window.fetch()
        elif at_once or self._schedule.sends_after(self._num_steps):
            self._send()
        # Again if another island, from which this one continues, has sent a fragment that is due.
        while self._is_in_flight and (at_once or self._schedule.applies_after(self._num_steps)):
            results.append(self._apply())
        while self.num_merges < max(self._wanted, self._agreed):
            results.append(self._merge())
        if self._agreed and self.num_merges == self._agreed:
            self._num_steps = 0  # the schedule begins again, on all islands
        return merge_results(results)

    def finish(self) -> MergeResult | None:
        """Wait for the last steps of all islands, and set all parameters to the weighted mean of the local ones.

        Call this once, after the last `step` and before `model.publish()`. Until all islands have called it, this
        island takes part in their merges, with a weight of 0. The outer optimizer is not used at the end, because its
        momentum is meant for the differences of `sync_every` steps. If the islands stop, there is no such mean.
        Collective over the island.
        """
        results = []
        while self._is_in_flight:
            results.append(self._apply())
        self._has_finished, num_averaged = True, 0
        while num_averaged < self._schedule.num_fragments and not self._stops:
            results.append(self._merge())
            num_averaged += self._num_finished == self._islands.size
        while self.num_merges < self._agreed:  # of islands that stop
            results.append(self._merge())
        self._num_steps = 0
        return merge_results(results)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Context manager in which the model has the outer parameters. Collective over the island on entry and exit.

        If the enclosed code raises an exception, this rank's slices are restored but not published, so the model can be
        saved but not used.
        """
        slices = self._model.shard_parameters()
        local = [each.detach().clone() for each in slices]
        self._model.overwrite_parameters(self._optimizer.outer)
        try:
            yield
        except BaseException:
            for each, value in zip(slices, local, strict=True):
                each.data.copy_(value)
            raise
        self._model.overwrite_parameters(local)

    def free(self) -> None:
        """Free the window. Collective over all islands. Idempotent. Call this before the islands are closed."""
        self._exchange.close()

    @property
    def _is_in_flight(self) -> bool:
        return self._num_sent > self.num_merges

    @property
    def _stops(self) -> bool:
        return self._stop is not None and self._stop.requested_on_any_rank

    def _merge(self) -> MergeResult | None:
        if not self._is_in_flight:
            self._send()
        return self._apply()

    def _send(self) -> None:
        fragment = self._num_sent % self._schedule.num_fragments
        until = max(self._wanted, self._agreed)
        self._taken = self._contributions.take(fragment)
        clock, every = max(self._clock, self._step_number), self._checkpoint_every
        saves = self._stops or (every and (clock + self._schedule.delay) // every > self._saved_clock // every)
        header = Header(*self._taken, until, clock, bool(saves), self._stops, self._has_finished)
        with self._model.spans.span("outer_sync"):
            self._exchange.send(fragment, header)
        self._num_sent += 1

    def _apply(self) -> MergeResult | None:
        """Apply the fragment in flight. Collective over the island.

        Returns None if no island had trained on it, or if the others have merged it without this island.
        """
        fragment = self.num_merges % self._schedule.num_fragments
        with self._model.spans.span("outer_sync"):
            received = self._exchange.receive(fragment)
            if isinstance(received, dict):
                self._continue_from(received)
                return None
            self.num_merges += 1
            self._members = received.islands
            self._warn_of_late_islands()
            self._agreed = int(max(header.until for header in received.headers))
            self._clock = int(max(header.clock for header in received.headers))
            self._num_finished = sum(bool(header.has_finished) for header in received.headers)
            has_ended = self._num_finished == self._islands.size
            if self._quorum and (has_ended or any(header.saves for header in received.headers)):
                self._saves, self._saved_clock = True, self._clock
            if self._stop and any(header.stops for header in received.headers):
                self._stop.requested_on_any_rank = True
            if has_ended:
                self._optimizer.average(fragment, received.mean)
            else:
                keep_local = self._islands.index not in received.left_out
                self._optimizer.apply(fragment, received.mean if received.is_used else None, keep_local=keep_local)
        return received.result if any(header.amount for header in received.headers) else None

    def _warn_of_late_islands(self) -> None:
        late = set(range(self._islands.size)) - {*self._members} - self._were_late
        self._were_late |= late
        if late and self._islands.index == self._members[0] and self._islands.island.rank == 0:
            names = ", ".join(map(str, sorted(late)))
            warn(
                f"WARNING: merge {self.num_merges} does not wait for island {names}, which is late. It enters a later "
                "merge; see late_islands and lag in the metrics"
            )

    def _progress(self) -> dict[str, Any]:
        clocks = {"clock": self._clock, "saved_clock": self._saved_clock}
        return {"merge": self.num_merges, "num_steps": self._num_steps, "in_flight": self._is_in_flight, **clocks}

    def _continue_from(self, progress: Mapping[str, Any]) -> None:
        """Take the place of another island in its schedule, after the outer parameters have become those of it."""
        fragment = self.num_merges % self._schedule.num_fragments
        self._contributions.give_back(fragment, self._taken)
        self._optimizer.take_back(fragment)
        self._contributions.miss(self.num_merges, progress["merge"])
        self._num_sent = self.num_merges = progress["merge"]
        self._num_steps = progress["num_steps"]
        self._clock, self._saved_clock = progress["clock"], progress["saved_clock"]
        if progress["in_flight"]:
            self._send()

    @property
    @override
    def allows_saving(self) -> bool:
        """True if the latest step ended with a merge. No fragment is in flight then.

        With a quorum, all islands of the merge save, or none.
        """
        if self._quorum:
            return self._saves
        return self._num_steps == 0 or self._schedule.applies_after(self._num_steps)

    @property
    @override
    def requests_saving(self) -> bool:
        return self._saves

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        self._clock = self._saved_clock = max(self._clock, completed_steps)

    @override
    def local_values(self) -> Sequence[float]:
        return (float(self._exchange.window.requested()),)

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        # Ranks of an island may see the request of another island at different times.
        self._wanted = int(gathered.per_rank("requested_merge").max())

    @override
    def on_optimizer_step(self, step: Step) -> None:
        self._step_number, self._saves = step.number, False
        has_changed = self._rule is not None and self._rule.update(step.metrics["grad_norm"])
        if has_changed or self._stops:
            self._wanted = max(self._wanted, self._num_sent + self._schedule.num_fragments)
            self._exchange.window.request(self._wanted)
        result = self.step(0 if step.metrics["skipped"] else _amount(step.minibatch))
        if step.number == self._last_step:
            result = merge_results([result, self.finish()])
        step.metrics |= result._asdict() if result else {"bytes_between_islands": 0.0, "island_wait_s": 0.0}

    @override
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors to save (see `Callback.tensors`). The outer parameters stand for the model.

        All but the parameters ("local") and the "residual" of this island are equal on all islands.
        """
        sections = {**self._saved(), "local": [each.detach() for each in self._model.shard_parameters()]}
        return {section: dict(zip(self._names, slices, strict=True)) for section, slices in sections.items()}

    @override
    def load_tensors(self, read: Callable[[str, str], torch.Tensor | None]) -> None:
        for section, slices in self._saved().items():
            if section == "residual" and not self._continues:
                continue
            for name, target in zip(self._names, slices, strict=True):
                if target.numel() and (value := read(section, name)) is not None:
                    target.copy_(value)

    def _saved(self) -> dict[str, list[torch.Tensor]]:
        optimizer = self._optimizer
        residuals = {} if optimizer.residuals is None else {"residual": optimizer.residuals}
        return {"model": optimizer.outer, **residuals, "outer/momentum_buffer": optimizer.velocities}

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {
            "schedule": asdict(self._schedule),
            "num_steps": self._num_steps,
            **self._contributions.state_dict(),
            "norm_watch": self._exchange.watch.state_dict(),
            "change_rule": self._rule and self._rule.state_dict(),
        }
        islands = {
            "size": self._islands.size,
            "index": self._islands.index,
            "merge": self.num_merges,
            "members": self._members,
            "clock": self._clock,
        }
        return {"islands": islands, "outer": state}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state if the checkpoint is one of islands that train apart.

        If the schedule or the number of islands has changed, the schedule begins again.
        """
        if not (state := state_dict.get("outer")):
            return
        islands = state_dict["islands"]
        self._continues = (islands["size"], islands["index"]) == (self._islands.size, self._islands.index)
        self._num_sent = self.num_merges = islands["merge"]
        self._clock = islands.get("clock", 0)
        self._exchange.window.start_after(self.num_merges)
        self._exchange.watch.load_state_dict(state["norm_watch"])
        if self._rule and state["change_rule"]:
            self._rule.load_state_dict(state["change_rule"])
        if self._continues and state["schedule"] == asdict(self._schedule):
            self._num_steps = state["num_steps"]
            self._contributions.load_state_dict(state)


def _amount(minibatch: PlannedMinibatch) -> int:
    return minibatch.num_tokens if minibatch.dataset.kind == "sequences" else len(minibatch.indices)
