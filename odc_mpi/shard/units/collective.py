"""Which units are ready where fetches are collective: the baseline that on-demand fetches are compared with.

All ranks must fetch the same units in the same order, so it is done as FSDP does it: a unit is released after its
forward, and again when another is fetched for the backward; the root, which stays for the backward, is released at the
next microbatch. Nothing is fetched ahead, and nothing stays.
"""

from collections.abc import Sequence

from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.shard.units.activity import in_backward
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits


class CollectivelyUnshardedUnits(UnshardedUnits):
    """Fetches units when they are needed and releases them after use, at the same places on every rank.

    Args:
        transport: Its fetches are collective.
        spans: Told of every wait for a fetch.
        traffic: Told of every fetch.
    """

    tensors_stay_valid = False

    def __init__(
        self, transport: Transport, spans: SpanRecorder | None = None, traffic: TrafficCounter | None = None
    ) -> None:
        super().__init__(transport, 0, spans, traffic, max_others=0)

    def start_microbatch(self) -> None:
        """Begin a microbatch with no unit ready."""
        super().start_microbatch()
        self.reshard_all()

    def post_forward(self, unit: Unit) -> None:
        """Release a unit after its forward, unless that ran again in a backward, which then needs the unit."""
        if not in_backward() and unit in self._held and not (unit.is_root or unit.num_forwards):
            self._reshard(unit)

    def unshard_all(self, units: Sequence[Unit]) -> None:
        """Refuse to keep the whole model.

        Raises:
            UserError: Always.
        """
        raise UserError("a resident model needs one-sided fetches, got a model over collectives: shard it over windows")
