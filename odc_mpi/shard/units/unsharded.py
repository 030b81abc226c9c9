"""The units that are ready: the root, the few used last, those expected next, and as many as a budget holds.

From `module.weight` to a tensor:

    modules.OnDemandParameters      looks up the parameter's dotted name
    autograd.UnitCalls.parameter    within one call of a unit always the same tensors; at the first of them:
    ReadyUnits.require              sharded: make room, start the fetch, wait; on its way: wait; ready: nothing. Then
                                    units that are expected next are fetched in a thread (`shard.prefetch`)
    Unit.start_fetch, Unit.wait     a `comm.work.FetchWork` of each flat array of the unit
    ParameterStore.fetch            a view; or `take`, a buffer, and `start_fetch`, which fills it: in the thread this
                                    part alone
    autograd.WholeParameters        a node of the graph; its outputs are tensors over the arrays (`Unit.parameter`)

Autograd asks for saved parameters by `autograd.SavedTensorHooks`, which calls `require`, too, and gradients leave from
`UnshardedParameters.backward` to `gradients.GradientPusher`. Two contexts change this: where modules hold plain parameters
(`shard.materialize`, `is_reshard_forbidden`) nothing is looked up, and between A and B (`fetch_allowed`) fetching is an error.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.transport import Access, Transport
from odc_mpi.comm.work import FetchWork
from odc_mpi.shard.cache_budget import CacheBudget
from odc_mpi.shard.prefetch import CommunicationThread, PrefetchPredictor
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.shard.units.activity import ActivityReporter, in_backward
from odc_mpi.shard.units.unit import Unit, UnitState

#: Units held besides the root, those in use and those that stay: one that computes, and one that comes or goes. Each
#: that is fetched ahead beyond the first adds one.
MAX_UNSHARDED_UNITS = 2


class UnshardedUnits:
    """Fetches units when they are needed, or shortly before, and releases those that were not used for longest.

    Args:
        transport: Hosts the shards.
        prefetch: How many of the uses that come next to fetch ahead, in a thread. From a transport whose fetches move
            no bytes, or that one thread only may call, nothing is.
        spans: Told of every wait for a fetch.
        traffic: Told of every fetch.
        max_others: Units held besides the root, the one in use and those that stay; by default as `prefetch` needs.

    Attributes:
        cache: What stays until the end of a minibatch. Nothing, where fetches move no bytes.
        activity: Tells the other ranks which unit is in use.
        parameter_version: Counts publications: what was fetched before the last one is stale.
        fetch_allowed: Whether parameters may be fetched: not between A and B, when owners write them. Set by the model.
        is_reshard_forbidden: Whether modules hold the units' tensors as plain parameters, so that no unit may be released.
    """

    def __init__(
        self,
        transport: Transport,
        prefetch: int = 0,
        spans: SpanRecorder | None = None,
        traffic: TrafficCounter | None = None,
        max_others: int | None = None,
    ) -> None:
        self.cache = CacheBudget()
        self.activity = ActivityReporter(transport.group)
        self._transport = transport
        self._spans = spans or SpanRecorder()
        self._traffic = traffic or TrafficCounter(transport)
        self._prefetch = prefetch if transport.parameters.access is Access.COPY and transport.threads else 0
        self._max_others = max(MAX_UNSHARDED_UNITS - 1, self._prefetch) if max_others is None else max_others
        self._thread = CommunicationThread("odc_mpi-fetch") if self._prefetch else None
        self._predictor: PrefetchPredictor[Unit] = PrefetchPredictor()
        # Ready or on their way, by use and by the start of a fetch ahead of it, the oldest first.
        self._held: dict[Unit, None] = {}
        self._latest: Unit | None = None
        self._by_pointer: dict[int, tuple[Unit, int]] = {}
        self.parameter_version = 0
        self.fetch_allowed = True
        self.is_reshard_forbidden = False

    @property
    def tensors_stay_valid(self) -> bool:
        """Whether what units show now may be kept until the end of the minibatch.

        Where all units are ready, nothing is fetched any more, and nothing makes room.
        """
        parameters = self._transport.parameters
        return parameters.access is Access.KEEP or len(self._by_pointer) == len(parameters.layouts)

    def unshard(self, unit: Unit) -> None:
        """Make a unit ready, and start to fetch those that come next. One-sided."""
        # Asked for every saved tensor: most often the unit is that of the last time, and the root stays anyway.
        doing = "backward of" if in_backward() else "forward of"
        if unit.state is UnitState.UNSHARDED and (unit is self._latest or unit.is_root):
            self.activity.update(doing, unit.name)
            return
        if unit.state is UnitState.SHARDED:
            self._check_fetch_allowed()
            self._make_room(unit, self._max_others)
            self._complete(unit, self._transport.parameters.fetch)
        elif unit.state is UnitState.FETCHING:
            self._complete(unit)
        else:
            self._held[unit] = self._held.pop(unit)
        self._latest = unit
        self.activity.update(doing, unit.name)
        if self._thread is not None:
            self._prefetch_after(unit)

    def start_microbatch(self) -> None:
        """Begin a microbatch."""
        self.activity.start_microbatch()

    def post_forward(self, unit: Unit) -> None:
        """Called after each forward of a unit, which stays ready here."""

    def find(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return the ready unit and its array that a tensor is a view of; None if there is none."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        return self._by_pointer.get(tensor.untyped_storage().data_ptr())

    @contextmanager
    def no_reshard(self) -> Iterator[None]:
        """Refuse in the enclosed code to release all units: modules hold their tensors."""
        self.is_reshard_forbidden = True
        try:
            yield
        finally:
            self.is_reshard_forbidden = False

    def reshard_all(self) -> None:
        """Release every unit, and wait for those on their way. One-sided.

        Raises:
            RuntimeError: Modules hold their tensors.
        """
        if self.is_reshard_forbidden:
            raise RuntimeError("parameters were to be released inside resident(gradients=False): leave it first")
        for unit in list(self._held):
            self._reshard(unit)
        self._latest = None
        self._predictor.reset_position()

    def unshard_all(self, units: Sequence[Unit]) -> None:
        """Make units ready that the budget holds all at once. One-sided."""
        missing = [unit for unit in units if not (unit.is_root or unit in self.cache)]
        if missing and self._transport.parameters.access is Access.COPY:
            # In buffers of their own size: one that is larger would take a part of the budget.
            self.clear()
            for unit in units:
                self.unshard(unit)

    def clear(self) -> None:
        """Release every unit and let go of the memory. One-sided, as `reshard_all`."""
        self.reshard_all()
        self._transport.parameters.buffers.clear()

    def invalidate(self) -> None:
        """Release every unit because parameters are about to change. One-sided, as `reshard_all`."""
        self.reshard_all()
        self.parameter_version += 1

    def check_current(self, parameter_version: int) -> None:
        """Refuse a backward whose forward saw other parameters, or some that are being written."""
        if parameter_version != self.parameter_version:
            raise RuntimeError("backward after publish(): the parameters that its forward used are gone")
        self._check_fetch_allowed()

    def check_unchanged(self) -> None:
        """Refuse that a parameter of a ready unit was changed in place."""
        for unit in self._held:
            unit.check_unchanged()

    def close(self) -> None:
        """Release every unit and end the thread. One-sided; a second call does nothing."""
        if self._thread is not None:
            self._thread.close()
        for unit in list(self._held):
            self._discard(unit)  # changed or not: it must not keep the windows from being freed
        self.invalidate()

    def _check_fetch_allowed(self) -> None:
        if not self.fetch_allowed:
            raise RuntimeError(
                "parameters were used between the end of a minibatch and publish(), while their owners may be writing "
                "them: evaluate or save after publish()"
            )

    def _complete(self, unit: Unit, fetch: Callable[[int], FetchWork] | None = None) -> None:
        """Wait for the fetch of a unit, which `fetch` starts if it is not on its way."""
        self._held.pop(unit, None)  # until it is there: a fetch may fail
        if self._transport.parameters.access is Access.COPY:
            self.activity.update("fetching", unit.name)
        start = time.perf_counter()
        if fetch is not None:
            self._start(unit, fetch)
        unit.wait()
        self._spans.add("fetch", start)
        self._held[unit] = None
        if not unit.is_root:
            self.cache.admit(unit, unit.buffer_bytes())
        self._by_pointer |= {pointer: (unit, i) for i, pointer in enumerate(unit.storage_pointers())}

    def _start(self, unit: Unit, fetch: Callable[[int], FetchWork]) -> None:
        unit.start_fetch(fetch)
        for index in unit.indices:
            self._traffic.add_fetch(index)

    def _prefetch_after(self, unit: Unit) -> None:
        """Start to fetch what is likely to be used after this unit, which is used now."""
        self._predictor.record(unit)
        expected = self._predictor.predict(self._prefetch)
        for following in expected:
            if following.state is UnitState.SHARDED:
                if not following.is_root:
                    self._make_room(unit, self._max_others - (unit not in self.cache), expected)
                self._start(following, self._fetch_in_thread)
                self._held[following] = None

    def _fetch_in_thread(self, index: int) -> FetchWork:
        assert self._thread is not None
        parameters = self._transport.parameters
        buffer = parameters.acquire_buffer(index)
        return FetchWork(buffer, self._thread.start(parameters.start_fetch, index, buffer))

    def _make_room(self, unit: Unit, num_others: int, keep: Collection[Unit] = ()) -> None:
        """Release the longest unused until at most so many are held besides this unit.

        The root, units in use and those that stay do not count.
        """
        others = [x for x in self._held if not (x is unit or x.is_root or x.num_forwards or x in self.cache)]
        idle = [x for x in others if x not in keep]
        for other in idle[: max(0, len(others) - num_others)]:
            self._reshard(other)

    def _reshard(self, unit: Unit) -> None:
        try:
            unit.check_unchanged()
        finally:
            self._discard(unit)

    def _discard(self, unit: Unit) -> None:
        if unit.state is UnitState.FETCHING:
            # Guessed wrong. A buffer that is being filled cannot be given back.
            self._complete(unit)
        for pointer in unit.storage_pointers():
            del self._by_pointer[pointer]
        del self._held[unit]
        self.cache.discard(unit)
        unit.reshard(self._transport)
