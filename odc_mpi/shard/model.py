"""`ShardedModel`, a module whose parameters are sharded.

    with model.minibatch():      one-sided fetches and pushes, partly on threads; ranks do not wait for each other
                                 at its end: gradients complete (collective)
    model.clip_grad_norm_(1.0)   gradient norm (collective)
    optimizer.step()             updates this rank's slices
    model.publish()              parameters published, gradients cleared (collective)

Construction, forward and backward, `unsharded`, `overwrite_parameters`, `state_dict`, `close` and setting `cache_bytes`
also communicate. A call in the wrong phase (`StepPhase`) raises RuntimeError.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odc_mpi.comm.layout import Slice
from odc_mpi.comm.transport import Transport
from odc_mpi.shard.activity import StepPhase
from odc_mpi.shard.autograd import UnitForwards
from odc_mpi.shard.cache_budget import CacheBytes, CacheNeeds
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.local_shards import LocalShards, ModuleWeightSource, WeightSource, require_elementwise
from odc_mpi.shard.minibatch_stats import TRAFFIC, MinibatchStats
from odc_mpi.shard.modules import (
    Placeholders,
    check_not_sharded,
    full_state_dict,
    materialized_parameters,
    replicate,
    wrap_forward,
)
from odc_mpi.shard.partition import UnitChoice, check_shardable, describe_tensors, make_units, partition
from odc_mpi.shard.spans import SpanRecorder, Usage
from odc_mpi.shard.units.unsharded import UnshardedUnits


class ShardedModel:
    """Module whose parameters are sharded across the ranks. Construction is collective.

    See `odc_mpi.shard_model` for the other arguments and for errors.

    Args:
        module: Module whose floating-point parameters are moved into the transport's shards. Its buffers and integer
            parameters are overwritten with those of rank 0.
        transport: Transport that fetches parameters and pushes gradients. It is closed along with the model.
        prefetch: Number of units to fetch ahead. Up to max(1, `prefetch`) pushes may be in flight. Units are
            prefetched only if fetches transfer data, and may run on another thread or need none.
        optimizer_device: Device of this rank's slices of trainable parameters. None means the host.
        dtypes: Dtypes, keyed by dotted name, of the parameters whose dtype differs from that of the transport.

    Attributes:
        module: The given module, whose `parameters()` are now placeholders.
        units: Nonempty units (groups of parameters that are fetched together), root first.
        layouts: Layouts of the flat arrays of all units.
        device: Device of the model and its inputs.
        spans: Recorder for the time that this rank spends on communication and other activities.
        usage: Time, memory and collectives that this rank has used so far.
        gradient_format: Number format of the gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        *,
        units: Iterable[UnitChoice] | None = None,
        weights: WeightSource | None = None,
        activation_checkpointing: bool = False,
        prefetch: int = 0,
        optimizer_device: torch.device | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch: expected a number of units, 0 or more, got {prefetch}")
        check_not_sharded(module)
        parameters_by_unit, self._names_by_module, self._names = partition(module, units)
        check_shardable(module, has_weights=weights is not None)
        # Otherwise, windows of different sizes could be accessed out of bounds.
        tensors = describe_tensors(module, parameters_by_unit, dtypes or {}, transport.parameters.dtype)
        transport.group.world.require_same(f"{tensors}\ngradients {transport.gradients.dtype}", "the model")
        self.module, self._transport = module, transport
        self.device = transport.device
        self.spans = SpanRecorder()
        self._phase = StepPhase.COMPLETE  # construction ends with the first `publish()`
        self.units, self.layouts = make_units(
            parameters_by_unit,
            transport.group.size,
            dtypes or {},
            transport.parameters.dtype,
            transport.group.num_islands,
            transport.frozen_owners,
        )
        # Closed in reverse order: the slices must drop their references to the windows before these are freed.
        self._resources = ExitStack()
        self._resources.callback(transport.close)
        with self.spans.span("windows"):
            transport.allocate(self.layouts, self.close)
        self._local_shards = LocalShards(transport, self.layouts, optimizer_device or torch.device("cpu"))
        self._resources.callback(self._local_shards.detach)
        self._unsharded = UnshardedUnits(self.units, transport, prefetch, self.spans)
        self._resources.callback(self._unsharded.close)
        self._pusher = GradientPusher(transport, prefetch, self.spans)
        self.gradient_format = self._pusher.gradient_format
        self._resources.callback(self._pusher.close)
        self.usage = Usage(transport, self.spans, self._pusher.buffers)
        forwards = UnitForwards(self._unsharded, self._pusher.push)
        with self.spans.span("weights"):
            self._local_shards.load(weights or ModuleWeightSource(parameters_by_unit, transport.group))
        replicate(module, transport)
        self._placeholders = Placeholders(self._names_by_module, transport, forwards)
        for unit in self.units:
            wrap_forward(module.get_submodule(unit.name), unit, forwards, activation_checkpointing)
        module.register_forward_pre_hook(lambda *_: self._unsharded.activity.start_microbatch())
        # A global hook, because the caller creates the optimizer later.
        self._resources.callback(register_optimizer_step_pre_hook(self._check_optimizer).remove)
        self.publish()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the module. One-sided."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ShardedModel":
        """Set training mode, or evaluation mode if `mode` is False, and return the model."""
        self.module.train(mode)
        return self

    def eval(self) -> "ShardedModel":
        """Set evaluation mode and return the model."""
        return self.train(False)

    def shard_parameters(self) -> list[nn.Parameter]:
        """Return this rank's slices of all trainable parameters, for the optimizer.

        Each slice, `[n]`, contains consecutive elements of the flattened parameter. Its dtype is fp32, or the
        parameter's dtype if that is wider. All ranks have the same number of slices, in the same order, so that each
        rank can create an optimizer. A slice is empty if other ranks own the whole parameter. After a minibatch,
        `.grad` is None if no rank used the parameter. It is always None for empty slices, so optimizers skip them.
        """
        return [shard.parameter for shard in self._local_shards.trainable]

    def named_shard_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the slices in `shard_parameters()` as pairs `(dotted name of the parameter, slice)`."""
        return [(shard.slice.spec.name, shard.parameter) for shard in self._local_shards.trainable]

    def slices(self) -> list[tuple[Slice, torch.Tensor]]:
        """Return this rank's slices of all parameters, including frozen ones, each with a view of its values.

        Change values of trainable parameters only between the end of a minibatch and `publish()`. Never change values
        of frozen parameters, because nodes cache them. Slices of trainable parameters have the same dtypes as in
        `shard_parameters()`, and those of frozen parameters have the dtypes of their shards.
        """
        return self._local_shards.all_slices()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of all sharded parameters, keyed by dotted name."""
        return {name: range_.spec.shape for unit in self.units for name, (_, range_) in unit.ranges.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Raise TypeError, because the module's parameters are placeholders. Use `shard_parameters()` instead."""
        raise TypeError("a sharded model has no parameters() of its own; give the optimizer model.shard_parameters()")

    @contextmanager
    def minibatch(self, *names: str) -> Iterator[MinibatchStats]:
        """Context manager for the forward and backward passes of a minibatch. Collective at its end.

        Yields the statistics of the minibatch, which the ranks exchange at its end, when all gradients are complete.
        `names` are the names of additional values in the statistics. If the enclosed code raises an exception, the end
        of the minibatch does not communicate.

        Raises:
            RuntimeError: `publish()` was not called after the previous minibatch, the model is closed, the
                `requires_grad` of a parameter has changed since sharding, or a parameter was changed in place.
        """
        self._placeholders.check_frozen()
        self._unsharded.check_unchanged()
        self._require_phase(StepPhase.PUBLISHED, "minibatch()")
        self._phase = StepPhase.MINIBATCH
        self._pusher.start()
        self._unsharded.activity.start_minibatch()
        minibatch = MinibatchStats((*names, *TRAFFIC))
        # Without try, because this rank must not enter the collective after an exception in the enclosed code.
        yield minibatch
        self._complete_communication()
        self._unsharded.activity.finish_minibatch()
        minibatch.local.update(zip(TRAFFIC, self._transport.take_traffic(), strict=True))
        pushed = [name in self._pusher.parameters_with_gradient for name, _ in self.named_shard_parameters()]
        report = minibatch.report(self.gradient_format.local_statistics(), pushed)
        with self.spans.span("gradients_complete"):  # A in docs/ordering.md
            reports = self._transport.complete_gradients(report)
        minibatch.receive_reports(reports)
        minibatch.finite = self.gradient_format.apply_global_statistics(minibatch.sums)
        self._local_shards.attach_gradients(minibatch.pushed, self.gradient_format)
        self._phase = StepPhase.COMPLETE

    def largest_pushed(self) -> dict[str, float]:
        """Push the gradients that are left, and return for each unit a bound on the sum of what this rank pushed.

        One-sided. Call it in a minibatch after the last backward pass. The values are keyed by the names of the units
        that got a gradient on this rank, in the order of `units`: the largest magnitude of a gradient element, times
        the number of pushes.
        """
        self._complete_communication()
        bounds = self.gradient_format.bounds()
        values = dict(zip(bounds, torch.stack([*bounds.values()]).tolist(), strict=True)) if bounds else {}
        pushed = {unit.name: [values[i] for i in unit.indices if i in values] for unit in self.units}
        return {name: max(each) for name, each in pushed.items() if each}

    def gather_values(self, values: Sequence[float]) -> np.ndarray:
        """Gather numbers of all ranks, `[k]` on each, into a float64 array `[ranks, k]`. Collective.

        For a loss that depends on all samples of a minibatch, call this before the first backward pass. Not for use
        between the end of a minibatch and `publish()`.
        """
        with self.spans.span("values_gathered"):  # K in docs/ordering.md
            return self._transport.group.gather_values(np.array(values, np.float64))

    def set_is_last_backward(self) -> None:
        """Announce that the next backward pass is the last one in this minibatch. This call is optional.

        The model then pushes locally accumulated gradients as soon as they are complete, which overlaps the pushes with
        computation. Otherwise, it pushes them at the end of the minibatch. With islands, a unit's gradients may also
        be sent to other islands immediately. A later backward pass through that unit then raises RuntimeError.
        """
        self._pusher.is_last_backward = True

    @property
    def cache_bytes(self) -> CacheBytes:
        """Maximum sizes of this rank's caches for unsharded units and for accumulated gradients, initially 0.

        Sizes may differ between ranks. Memory beyond `cache_needs.maximum` remains unused. Setting the sizes is
        one-sided and clears both caches, so do this only between minibatches.
        """
        return CacheBytes(self._unsharded.cache.budget_bytes, self._pusher.cache.budget_bytes)

    @cache_bytes.setter
    def cache_bytes(self, cache_bytes: CacheBytes) -> None:
        needs = self.cache_needs
        self._unsharded.cache.budget_bytes = cache_bytes.parameters if needs.maximum.parameters else 0
        self._pusher.cache.budget_bytes = cache_bytes.gradients if needs.maximum.gradients else 0
        self._unsharded.clear()
        self._pusher.buffers.clear()

    @property
    def cache_needs(self) -> CacheNeeds:
        """Range of sizes in which the two caches in `cache_bytes` are useful."""
        return CacheNeeds.measure(self.units, self._transport)

    @contextmanager
    def unsharded(self, *, gradients: bool = True) -> Iterator[None]:
        """Context manager that keeps the full model unsharded on this rank, so that the enclosed code fetches nothing.

        One-sided. Use it around a series of forward passes, as in generation. Units stay unsharded until the next
        minibatch ends or `publish()` is called.

        Args:
            gradients: True if the enclosed code may run a backward pass. If False, the modules hold full parameters
                without gradients. Forward passes are then as fast as without sharding, but no minibatch may end inside.

        Raises:
            UserError: The parameter cache is too small to hold all units except the root.
        """
        self.cache_needs.require_full_model(self.cache_bytes)
        self._unsharded.unshard_all()
        if gradients:
            yield
            return
        with materialized_parameters(self._names_by_module, self._unsharded):
            yield

    def forget_order(self) -> None:
        """Forget in which order units were used, which predicts what to fetch, because the next pass uses others."""
        self._unsharded.forget_order()

    def activity(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context manager that publishes `what`, instead of the unit in use, as this rank's status.

        Forward passes in the enclosed code, for example in generation, do not count as microbatches. Other ranks' error
        messages insert `what` after "was last seen". The context manager yields a function that replaces `what`.
        """
        return self._unsharded.activity.override(what)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their total norm is at most `max_norm`. Collective.

        Returns the total norm before scaling. If it is not finite, the gradients are not scaled.
        """
        self._require_phase(StepPhase.COMPLETE, "clip_grad_norm_()")
        gradients = self._local_shards.gradients()
        squares = self.gradient_format.sum_of_squares(gradients)
        with self.spans.span("grad_norm"):  # N in docs/ordering.md
            norm = self.gradient_format.norm(self._transport.group.norm(squares))
        coefficient = max_norm / (norm + 1e-6)  # 1e-6 as in `torch.nn.utils.clip_grad_norm_`
        if gradients and math.isfinite(norm) and coefficient < 1.0:
            torch._foreach_mul_([each for slices in gradients.values() for each in slices], coefficient)
        return norm

    def divide_gradients_(self, divisor: float) -> None:
        """Divide all gradients by `divisor`, which must be equal on all ranks."""
        gradients = [each for slices in self._local_shards.gradients().values() for each in slices]
        if gradients and divisor != 1.0:
            torch._foreach_div_(gradients, divisor)
        self.gradient_format.note_scaling(divisor)

    def publish(self) -> None:
        """Make this rank's updated parameters visible to all ranks, and clear its gradients. Collective."""
        self._require_phase(StepPhase.COMPLETE, "publish()")
        self._phase = StepPhase.PUBLISHED
        self._unsharded.invalidate()
        self._local_shards.write_back()
        with self.spans.span("parameters_published"):  # B in docs/ordering.md
            self._transport.publish_parameters()
        self._unsharded.fetch_allowed = True

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all full parameters, in the dtypes of the shards, and of all persistent buffers.

        One-sided: a single rank may call it, except between the end of a minibatch and `publish()`. The calling rank
        needs enough memory for the full model.
        """
        with self._placeholders.allow_state_dict():
            state = dict(self.module.state_dict())
        return state | full_state_dict(state, self._names, self._unsharded)

    def units_with_nonfinite_gradients(self) -> list[str]:
        """Return the names of the units for which this rank pushed non-finite gradients in the last minibatch.

        The names are in the order of a backward pass, except that the root unit, "", comes last.
        """
        not_finite = {index for index, bound in self.gradient_format.bounds().items() if not bound.isfinite()}
        return [unit.name for unit in reversed(self.units) if not_finite & set(unit.indices)]

    @property
    def frozen_bytes(self) -> int:
        """Size of all frozen arrays in bytes."""
        dtype_of = self._transport.parameters.dtype_of
        return sum(x.numel * dtype_of(i).itemsize for i, x in enumerate(self.layouts) if not x.trainable)

    @property
    def num_islands(self) -> int:
        """Number of islands, each of which holds all parameters, or 1 without islands."""
        return self._transport.group.num_islands

    @torch.no_grad()
    def overwrite_parameters(self, values: Iterable[torch.Tensor]) -> None:
        """Copy new values into the slices in `shard_parameters()`, and publish them. Collective.

        Call this between two minibatches. `values` contains one tensor per slice, in the same order and shape.
        """
        self._require_phase(StepPhase.PUBLISHED, "overwrite_parameters()")
        self._phase = StepPhase.COMPLETE
        self._unsharded.reshard_all()
        self._transport.group.parameters_published()  # other ranks may still fetch
        for parameter, value in zip(self.shard_parameters(), values, strict=True):
            parameter.copy_(value)
        self.publish()

    def close_first(self, other: "ShardedModel") -> None:
        """Close `other`, such as a reference model, when this model is closed."""
        self._resources.callback(other.close)

    def close(self) -> None:
        """Free the windows. Collective. Idempotent. The tensors from `shard_parameters()` keep their values."""
        self._phase = StepPhase.CLOSED
        self._resources.close()

    def _complete_communication(self) -> None:
        self._transport.group.world.set_status("completing its fetches and pushes")
        # Before the collective, because after it, owners may write to their shards while a fetch in flight still reads.
        self._unsharded.reshard_all()
        self._unsharded.fetch_allowed = False
        self._pusher.finish()

    def _require_phase(self, expected: StepPhase, call: str) -> None:
        if self._phase is not expected:
            raise RuntimeError(f"{call}: expected the phase {expected.value!r}, got {self._phase.value!r}")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._placeholders.check_trained(parameters)
        if not set(map(id, self.shard_parameters())).isdisjoint(map(id, parameters)):
            require_elementwise(optimizer)
            self._require_phase(StepPhase.COMPLETE, "an optimizer's step")
