"""Unsharded units for collective fetches, the baseline of the benchmarks.

All ranks must fetch the same units in the same order. The units therefore follow the schedule of FSDP: a unit is
resharded after its forward and, in the backward, when the next unit is fetched. The root unit stays unsharded until the
next microbatch. Nothing is prefetched or cached.
"""

from collections.abc import Sequence

from typing_extensions import override

from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.shard.units.activity import in_backward
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits


class CollectivelyUnshardedUnits(UnshardedUnits):
    """Unsharded units that every rank fetches and reshards at the same places."""

    tensors_stay_valid = False

    def __init__(
        self, transport: Transport, spans: SpanRecorder | None = None, traffic: TrafficCounter | None = None
    ) -> None:
        super().__init__(transport, 0, spans, traffic, max_others=0)

    @override
    def start_microbatch(self) -> None:
        super().start_microbatch()
        self.reshard_all()

    def post_forward(self, unit: Unit) -> None:
        """Reshard a unit after its forward, except after a recomputation, since the backward then needs the unit."""
        if not in_backward() and unit in self._held and not (unit.is_root or unit.num_forwards):
            self._reshard(unit)

    @override
    def unshard_all(self, units: Sequence[Unit]) -> None:
        raise UserError("unsharded(): expected one-sided fetches, got a model over collectives: shard it over windows")
