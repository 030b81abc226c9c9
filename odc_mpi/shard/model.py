"""A module whose parameters are spread over the ranks, and the minibatch with its boundary.

    with model.minibatch():      fetches and pushes, one-sided, also from threads; nobody waits for anybody
                                 A at the end: gradients complete
    model.clip_grad_norm_(1.0)   N: norm
    optimizer.step()             local, on this rank's slices
    model.publish()              B: parameters published, gradients cleared

Nothing else here communicates, but for `ShardedModel()`, which is collective, and `state_dict`, which is one-sided.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.transport import Access, Transport
from odc_mpi.shard.autograd import SavedTensorHooks, UnitForwards
from odc_mpi.shard.cache_budget import CacheBytes, CacheNeeds
from odc_mpi.shard.gradient_format import FixedPointGradients, make_gradient_format
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.layout import Slice
from odc_mpi.shard.local_shards import LocalShards, ModuleWeightSource, WeightSource
from odc_mpi.shard.materialize import materialized_parameters
from odc_mpi.shard.minibatch_stats import TRAFFIC, MinibatchStats
from odc_mpi.shard.modules import full_state_dict, install_on_demand_parameters, replicate, wrap_forward
from odc_mpi.shard.optim import StepGuard, clip_coefficient, require_elementwise
from odc_mpi.shard.partition import UnitChoice, check_shardable, make_units, partition
from odc_mpi.shard.step_phases import SYNC_POINTS, SpanRecorder, StepPhase, StepPhases
from odc_mpi.shard.units.collective import CollectivelyUnshardedUnits
from odc_mpi.shard.units.unsharded import UnshardedUnits


class ShardedModel:
    """A module of which every rank owns a shard. Making one is collective.

    Args:
        module: Its floating-point parameters move into the transport's windows; `weights` must be given if they are on
            the meta device. Everything else, buffers and integer parameters, stays whole on every rank, as on rank 0.
        transport: Hosts the shards.
        units: Classes, class names or submodules whose parameters travel together; by default the module's
            `_no_split_modules`. What is left is the root unit.
        weights: Where initial parameters come from; by default the module's own, those of rank 0.
        activation_checkpointing: Keep only the inputs of each unit for the backward, and run its forward again there.
        prefetch: How many units to fetch ahead of their use, where the transport can. With 0 no thread is started;
            with 1 or more, gradients are pushed from a thread, too.
        optimizer_device: Where this rank's slices are optimized; by default on the host, where the shards are.
        dtypes: Types of parameters, by name, that are hosted in another type than the transport's.

    Raises:
        ValueError: A choice of units that matches nothing, parameters without values or complex, an embedding with
            `max_norm`, a negative `prefetch`.

    Attributes:
        module: The module; calling it is calling the model. Its `parameters()` are placeholders.
        units: All units that have parameters, the root first.
        layouts: How parameters are spread over the ranks: the flat arrays of each unit.
        device: Where the module computes, and its inputs have to be.
        spans: Where this rank's time went besides computing.
        traffic: What this rank fetched and pushed.
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
        parts, places = partition(module, units)
        check_shardable(module, parts, has_weights=weights is not None)
        self.module, self._transport, self._param_infos = module, transport, places
        self.device = transport.device
        self.spans = SpanRecorder()
        self._phases = StepPhases(self.spans)
        self.traffic = TrafficCounter(transport)
        self.units, self.layouts = make_units(parts, transport.group.size, dtypes or {})
        # Freed in reverse: before the windows go, the slices must let go of them.
        self._resources = ExitStack()
        self._resources.callback(transport.close)
        transport.allocate(self.layouts, self.close)
        self._local_shards = LocalShards(transport, self.layouts, optimizer_device or torch.device("cpu"))
        self._resources.callback(self._local_shards.detach)
        for unit in self.units:
            self._resources.callback(unit.drop_aliases)
        self._unsharded = (
            UnshardedUnits(transport, prefetch, self.spans, self.traffic)
            if transport.one_sided
            else CollectivelyUnshardedUnits(transport, self.spans, self.traffic)
        )
        self._resources.callback(self._unsharded.close)
        self._gradient_format = make_gradient_format(transport.gradients.dtype, self.layouts)
        self._pusher = GradientPusher(transport, prefetch > 0, self.spans, self.traffic, self._gradient_format)
        self._resources.callback(self._pusher.close)
        calls = UnitForwards(self._unsharded, self._pusher.push)
        saved = SavedTensorHooks(self._unsharded)
        self._local_shards.load(weights or ModuleWeightSource(parts, transport.group))
        replicate(module, transport)
        self._placeholders = install_on_demand_parameters(places, self.units, transport, calls)
        for unit in self.units:
            wrap_forward(module.get_submodule(unit.name), unit, calls, saved, activation_checkpointing)
        module.register_forward_pre_hook(lambda *_: self._unsharded.start_microbatch())
        guard = StepGuard([*self.shard_parameters(), *self._placeholders.tensors()], self._check_optimizer)
        self._resources.callback(guard.close)
        self.publish()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. One-sided."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ShardedModel":
        """Set training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "ShardedModel":
        """Set evaluation mode."""
        return self.train(False)

    def shard_parameters(self) -> list[nn.Parameter]:
        """Return this rank's slices of all trainable parameters, to give to an optimizer.

        After a minibatch each has a `.grad`, on every rank or on none: None if no rank used the parameter.

        Each is `[n]`, a stretch of the flattened parameter, empty where this rank owns nothing of it; every rank has
        the same number of them, in the same order. In fp32, or in `param_dtype` if that is wider.
        """
        return [own.parameter for own in self._local_shards.trainable]

    def named_shard_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's slices with the parameters' dotted names."""
        return [(own.slice.spec.name, own.parameter) for own in self._local_shards.trainable]

    def slices(self) -> list[tuple[Slice, torch.Tensor]]:
        """Return this rank's slices of all parameters, frozen ones too, each as it is optimized.

        Views, empty where this rank owns nothing; they change from point A to B, and not otherwise.
        """
        return self._local_shards.all_slices()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every sharded parameter by dotted name."""
        return {name: slot.spec.shape for unit in self.units for name, (_, slot) in unit.ranges.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Refuse: the module's own parameters are placeholders, which training would not change."""
        raise TypeError("a sharded model has no parameters() of its own; give the optimizer model.shard_parameters()")

    @contextmanager
    def minibatch(self, *names: str) -> Iterator[MinibatchStats]:
        """Enclose the forwards and backwards of one minibatch. Collective at its end, which is point A.

        Args:
            names: Of numbers that every rank tells all others at point A; the same on every rank.

        Yields:
            The minibatch, to add numbers to.
        """
        self._placeholders.check_frozen()
        self._unsharded.check_unchanged()
        self._phases.advance(StepPhase.PUBLISHED, StepPhase.MINIBATCH, "minibatch()")
        self._pusher.start()
        self._unsharded.activity.start_minibatch()
        minibatch = MinibatchStats((*names, *TRAFFIC))
        # An exception in the enclosed code does not come back here: a rank that failed must not meet the others.
        yield minibatch
        self._transport.group.set_status("completing its fetches and pushes")
        # Before A: an owner that has passed it may write what a fetch on its way would still read.
        self._unsharded.reshard_all()
        self._unsharded.fetch_allowed = False
        self._pusher.finish()
        self._unsharded.activity.finish_minibatch()
        minibatch.local.update(zip(TRAFFIC, self.traffic.bytes_since_last_call(), strict=True))
        report = minibatch.report(
            self._gradient_format.local_statistics(),
            self._local_shards.with_gradient(self._pusher.parameters_with_gradient),
        )
        minibatch.receive_reports(
            self._phases.synchronize("gradients_complete", lambda: self._transport.complete_gradients(report))
        )
        minibatch.finite = self._gradient_format.apply_global_statistics(minibatch.sums)
        self._local_shards.attach_gradients(minibatch.pushed, self._gradient_format)
        self._phases.phase = StepPhase.COMPLETE

    def set_is_last_backward(self) -> None:
        """Tell that no backward follows the next one in this minibatch. Local; it need not be told.

        What was added up of a unit's gradients is then pushed as soon as that backward has the last of them, beside the
        computation, and not after it.
        """
        self._pusher.is_last_backward = True

    @property
    def cache_bytes(self) -> CacheBytes:
        """What this rank may spend to keep fetched units, and gradients that are pushed once.

        A rank's own affair, and 0 at first. No more than `cache_needs` is of use. To be changed between minibatches;
        what was kept so far is released, and its memory freed.
        """
        return CacheBytes(self._unsharded.cache.budget_bytes, self._pusher.residency.budget_bytes)

    @cache_bytes.setter
    def cache_bytes(self, cache_bytes: CacheBytes) -> None:
        needs = self.cache_needs
        self._unsharded.cache.budget_bytes = cache_bytes.parameters if needs.maximum.parameters else 0
        self._pusher.residency.budget_bytes = cache_bytes.gradients if needs.maximum.gradients else 0
        self._unsharded.clear()
        self._pusher.clear()

    @property
    def cache_needs(self) -> CacheNeeds:
        """What the caches could take."""
        return CacheNeeds.measure(self.units, self._transport)

    @contextmanager
    def unsharded(self, *, gradients: bool = True) -> Iterator[None]:
        """Have the whole model on this rank in the enclosed code, which then fetches nothing. One-sided.

        For forwards in a row, such as those of generation. What was fetched stays beyond the enclosed code, as all that
        the budget holds does, until the next minibatch ends or parameters change. Where fetches move no bytes, nothing
        is fetched.

        Args:
            gradients: Whether a backward may follow. Without one modules have plain parameters meanwhile, and a forward
                costs what it costs an unsharded module; a minibatch must not end in the enclosed code.

        Raises:
            UserError: `comm.parameter_cache_bytes` does not hold all units but the root, or fetches are collective.
        """
        if self._transport.parameters.access is Access.COPY:
            self.cache_needs.require_whole_model(self.cache_bytes)
            self._unsharded.unshard_all(self.units)
        plain = nullcontext() if gradients else materialized_parameters(self._param_infos, self.units, self._unsharded)
        with plain:
            yield

    def activity(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Tell other ranks what the enclosed forwards are for, in place of the units in use.

        They are no microbatches: forwards of generation, one for each token.

        Args:
            what: Words that follow "was last seen".

        Yields:
            A function that tells other words.
        """
        return self._unsharded.activity.override(what)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their common norm is at most `max_norm`; point N. Collective.

        Returns:
            The norm over all parameters of all ranks before scaling. Gradients that are not finite stay as they are.
        """
        self._phases.require(StepPhase.COMPLETE, "clip_grad_norm_()")
        gradients = self._local_shards.gradients()
        own = self._gradient_format.sum_of_squares(gradients)
        norm = self._gradient_format.norm(
            self._phases.synchronize("grad_norm", lambda: self._transport.group.norm(own))
        )
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient < 1.0:
            torch._foreach_mul_([each for slices in gradients.values() for each in slices], coefficient)
        return norm

    def divide_gradients_(self, divisor: float) -> None:
        """Divide all gradients by a number, the same on every rank; before they are clipped."""
        gradients = [each for slices in self._local_shards.gradients().values() for each in slices]
        if gradients and divisor != 1.0:
            torch._foreach_div_(gradients, divisor)
        self._gradient_format.note_scaling(divisor)

    @property
    def fixed_point_gradients(self) -> FixedPointGradients | None:
        """How gradients are added up as integers; None if they are floating-point."""
        return self._gradient_format if isinstance(self._gradient_format, FixedPointGradients) else None

    def publish(self) -> None:
        """Show this rank's parameters to all, clear the gradients, and meet: point B. Collective."""
        self._phases.advance(StepPhase.COMPLETE, StepPhase.PUBLISHED, "publish()")
        self._unsharded.invalidate()
        self._local_shards.write_back()
        self._phases.synchronize("parameters_published", self._transport.publish_parameters)
        self._unsharded.fetch_allowed = True

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, as they are hosted, and persistent buffers, whole and copied, by the module's names.

        One-sided: any rank may call it alone, but not between points A and B; collective where the transport's fetches
        are. The caller needs room for all of it.
        """
        with self._placeholders.saved():
            state = dict(self.module.state_dict())
        return state | full_state_dict(state, self._param_infos, self.units, self._unsharded)

    @property
    def fetch_wait_s(self) -> float:
        """Seconds spent waiting for parameters since the start."""
        return self.spans.seconds["fetch"]

    @property
    def accumulate_wait_s(self) -> float:
        """Seconds spent pushing gradients since the start."""
        return self.spans.seconds["accumulate"]

    @property
    def boundary_wait_s(self) -> float:
        """Seconds spent at the points A, N and B since the start."""
        return sum(self.spans.seconds[point] for point in SYNC_POINTS)

    @property
    def peak_parameter_bytes(self) -> int:
        """The most bytes this rank ever held for parameters: window shards and buffers of fetched units."""
        parameters = self._transport.parameters
        return parameters.shard_bytes + parameters.buffers.peak_bytes

    @property
    def peak_gradient_bytes(self) -> int:
        """The most bytes this rank ever held for gradients of units: shards, sums, pushes on their way."""
        shards = sum(layout.shard_numel for layout in self.layouts if layout.trainable)
        return shards * self._transport.gradients.dtype.itemsize + self._pusher.peak_buffer_bytes

    @property
    def num_collectives(self) -> int:
        """Collective operations since the start: at the ordering points, and fetches and pushes that are."""
        return self._transport.group.num_collectives

    def close(self) -> None:
        """Free the windows; slices keep their values. Collective; a second call does nothing."""
        self._resources.close()

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the step of an optimizer that has slices, or what stands in the module for parameters."""
        given = [p for group in optimizer.param_groups for p in group["params"]]
        self._placeholders.check_trained(given)
        if {id(p) for p in given} & {id(p) for p in self.shard_parameters()}:
            require_elementwise(optimizer)
            self._phases.require(StepPhase.COMPLETE, "an optimizer's step")
