"""Cache of unsharded units.

A unit is fetched, and thus unsharded, when it is used, or shortly before that by the fetch thread. Units stay unsharded
as follows:

    root unit                      until the minibatch ends (`reshard_all`)
    units in a forward pass        until the forward pass returns
    units within `cache`           until the minibatch ends, like all units whose arrays are views of shared memory
    other units                    at most max(1, prefetch) of them; the least recently used one is resharded first

`autograd.UnitForwards` calls `unshard` when a module looks up a parameter; `autograd.SavedTensorHooks` calls it for
parameters that autograd has saved.
"""

from collections.abc import Collection, Sequence

import torch

from odc_mpi.comm.transport import Transport
from odc_mpi.comm.work import FetchWork
from odc_mpi.shard.activity import ActivityReporter, in_backward
from odc_mpi.shard.cache_budget import CacheBudget
from odc_mpi.shard.prefetch import CommunicationThread, PrefetchPredictor
from odc_mpi.shard.spans import SpanRecorder
from odc_mpi.shard.units.unit import Unit, UnitState

#: Maximum number of unsharded units, not counting the root, units in a running forward pass, and units in the cache:
#: one that is in use, and one that is being fetched or resharded. Each prefetched unit beyond the first adds one.
MAX_UNSHARDED_UNITS = 2


class UnshardedUnits:
    """Unsharded units of a model, fetched on demand or ahead of use. The least recently used one is resharded first.

    Args:
        units: All units of the model.
        prefetch: Number of units to fetch ahead, on a separate thread if fetches call MPI. Ignored if fetches transfer
            no data, or if they need this thread but only one thread may call the transport.

    Attributes:
        cache: Budget for buffers of units that stay unsharded until the minibatch ends. Unused if fetches return views.
        parameter_version: Version of the parameters, incremented by `invalidate`.
        fetch_allowed: False while owners may write to their shards. Fetches then raise RuntimeError. Set by the model.
        reshard_forbidden: True while modules hold the tensors of the units (`modules.materialized_parameters`).
    """

    def __init__(self, units: Sequence[Unit], transport: Transport, prefetch: int, spans: SpanRecorder) -> None:
        self.units = units
        self.cache = CacheBudget()
        self.activity = ActivityReporter(transport.group)
        self._transport, self._spans = transport, spans
        parameters = transport.parameters
        can_prefetch = parameters.enqueues_only or transport.thread_safe
        self._prefetch = prefetch if can_prefetch and parameters.transfers else 0
        self._max_others = max(MAX_UNSHARDED_UNITS - 1, self._prefetch)
        needs_thread = self._prefetch and not parameters.enqueues_only
        self._thread = CommunicationThread("odc_mpi-fetch") if needs_thread else None
        self._predictor = PrefetchPredictor()
        # Units that are unsharded or being fetched, ordered by last use or start of the prefetch, oldest first.
        self._held: dict[Unit, None] = {}
        self._latest: Unit | None = None
        self._by_pointer: dict[int, tuple[Unit, int]] = {}
        self.parameter_version = 0
        self.fetch_allowed = True
        self.reshard_forbidden = False
        self._is_closed = False

    @property
    def tensors_stay_valid(self) -> bool:
        """True if unsharded tensors stay valid until the minibatch ends."""
        parameters = self._transport.parameters
        # If all units are unsharded, no fetches follow, so no unit is resharded to make room.
        return parameters.stays_valid or len(self._by_pointer) == len(parameters.layouts)

    def unshard(self, unit: Unit) -> None:
        """Make a unit's full parameters available and start prefetching the units expected next. One-sided."""
        # Called for every saved tensor, usually for the same unit as before or for the root, which stays unsharded.
        phase = "backward of" if in_backward() else "forward of"
        if unit.state is UnitState.UNSHARDED and (unit is self._latest or unit.is_root):
            self.activity.update(phase, unit.name)
            return
        if unit.state is UnitState.SHARDED:
            self._check_fetch_allowed()
            self._make_room(unit, self._max_others)
        if unit.state is UnitState.UNSHARDED:
            self._held[unit] = self._held.pop(unit)
        else:
            self._complete(unit)
        self._latest = unit
        self.activity.update(phase, unit.name)
        if self._prefetch:
            self._prefetch_after(unit)

    def find(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return `(unit, i)` if `tensor` uses the memory of an unsharded unit's array `i`, otherwise None."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        return self._by_pointer.get(tensor.untyped_storage().data_ptr())

    def reshard_all(self) -> None:
        """Complete fetches in flight and reshard all units. One-sided. Raises RuntimeError if `reshard_forbidden`."""
        if self.reshard_forbidden:
            raise RuntimeError("parameters cannot be resharded inside unsharded(gradients=False): leave it first")
        for unit in list(self._held):
            self._reshard(unit)
        self._latest = None
        self._predictor.reset_position()

    def unshard_all(self) -> None:
        """Unshard all units, so that later forward passes fetch nothing. One-sided.

        All units but the root must fit into the cache. No effect if fetches return views of the owners' memory.
        """
        missing = [unit for unit in self.units if not (unit.is_root or unit in self.cache)]
        if missing and self._transport.parameters.transfers:
            # Cleared, so that no unit gets an overly large buffer, which would take up more of the budget.
            self.clear()
            for unit in self.units:
                self.unshard(unit)

    def forget_order(self) -> None:
        """Forget in which order units were used, so that none is prefetched that the next pass does not use."""
        self._predictor = PrefetchPredictor()

    def clear(self) -> None:
        """Reshard all units and free their buffers. One-sided."""
        self.reshard_all()
        self._transport.parameters.buffers.clear()

    def invalidate(self) -> None:
        """Reshard all units before their parameters change, and make autograd reject later uses of them. One-sided."""
        self.reshard_all()
        for unit in self.units:
            unit.invalidate()
        self.parameter_version += 1

    def check_current(self, parameter_version: int) -> None:
        """Raise RuntimeError if `parameter_version` is not the current version or fetches are not allowed."""
        if parameter_version != self.parameter_version:
            raise RuntimeError("backward after publish() or close(): the parameters that its forward used are gone")
        self._check_fetch_allowed()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter of an unsharded unit has been changed in place."""
        for unit in self._held:
            unit.check_unchanged()

    def close(self) -> None:
        """Reshard all units and end the fetch thread. One-sided. Idempotent."""
        if self._thread is not None:
            self._thread.close()
        try:
            for unit in list(self._held):
                self._discard(unit)  # without a check for changes, so that the windows can be freed in any case
            self.invalidate()
        finally:
            for unit in self.units:
                unit.drop_aliases()
        self._is_closed = True

    def _check_fetch_allowed(self) -> None:
        if self._is_closed:
            raise RuntimeError("parameters were used after close() of their model: build and shard a new module")
        if not self.fetch_allowed:
            raise RuntimeError(
                "parameters were used between the end of a minibatch and publish(), while their owners may be writing "
                "them: evaluate or save after publish()"
            )

    def _complete(self, unit: Unit) -> None:
        """Complete the fetch of a unit, after starting it if the unit is sharded."""
        self._held.pop(unit, None)  # until the fetch is complete, since it may fail
        parameters = self._transport.parameters
        if parameters.transfers:
            self.activity.update("fetching", unit.name)
        with self._spans.span("fetch"):
            if unit.state is UnitState.SHARDED:
                unit.start_fetch(parameters.fetch)
            unit.wait()
        self._held[unit] = None
        if not unit.is_root:
            # Resharding a view would free no memory. A buffer may be larger than its array.
            arrays = zip(unit.indices, unit.arrays, strict=True)
            self.cache.admit(
                unit, sum(array.untyped_storage().nbytes() for i, array in arrays if parameters.uses_buffer(i))
            )
        self._by_pointer |= {array.untyped_storage().data_ptr(): (unit, i) for i, array in enumerate(unit.arrays)}

    def _prefetch_after(self, unit: Unit) -> None:
        self._predictor.record(unit)
        expected = self._predictor.predict(self._prefetch)
        for following in expected:
            if following.state is UnitState.SHARDED:
                if not following.is_root:
                    self._make_room(unit, self._max_others - (unit not in self.cache), expected)
                following.start_fetch(self._fetch_ahead)
                self._held[following] = None

    def _fetch_ahead(self, index: int) -> FetchWork:
        parameters = self._transport.parameters
        if self._thread is None:
            return parameters.fetch(index)
        buffer = parameters.acquire_buffer(index)
        return FetchWork(buffer, self._thread.start(parameters.start_fetch, index, buffer))

    def _make_room(self, unit: Unit, num_others: int, keep: Collection[Unit] = ()) -> None:
        """Reshard the least recently used units until at most `num_others` besides `unit` are unsharded.

        The root, units in a forward pass and cached units are not counted, and units in `keep` are not resharded.
        """
        others = [x for x in self._held if not (x is unit or x.is_root or x.num_running_forwards or x in self.cache)]
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
            # The prediction was wrong. A buffer cannot be released while a fetch is filling it.
            self._complete(unit)
        for array in unit.arrays:
            del self._by_pointer[array.untyped_storage().data_ptr()]
        del self._held[unit]
        self.cache.discard(unit)
        parameters = self._transport.parameters
        unit.reshard(parameters.release, in_buffers=any(map(parameters.uses_buffer, unit.indices)))
