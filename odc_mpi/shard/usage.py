"""Time, memory and collectives that a sharded model has used on one rank. This module does not communicate."""

from collections import Counter

from odc_mpi.comm.transport import Transport
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.step_phases import SYNC_POINTS, SpanRecorder


class Usage:
    """Time, memory and collectives that this rank has used since the model was constructed."""

    def __init__(self, transport: Transport, spans: SpanRecorder, pusher: GradientPusher) -> None:
        self._transport, self._spans, self._pusher = transport, spans, pusher

    @property
    def fetch_wait_s(self) -> float:
        """Total time that the computing thread has waited for parameters, in seconds."""
        return self._spans.seconds["fetch"]

    @property
    def accumulate_wait_s(self) -> float:
        """Total time that the computing thread has spent starting pushes and waiting for them, in seconds."""
        return self._spans.seconds["accumulate"]

    @property
    def boundary_wait_s(self) -> float:
        """Total time that this rank has waited at synchronization points, in seconds."""
        return sum(self._spans.seconds[point] for point in SYNC_POINTS)

    @property
    def island_wait_s(self) -> float:
        """The part of `boundary_wait_s` spent waiting in `comm.islands`, in seconds; 0 without islands."""
        return self._transport.exchange.wait_s if self._transport.exchange else 0.0

    @property
    def peak_parameter_bytes(self) -> int:
        """Peak memory that this rank has used for parameter shards and fetched units, in bytes."""
        parameters = self._transport.parameters
        return parameters.shard_bytes + self.node_cache_bytes + parameters.buffers.peak_bytes

    @property
    def node_cache_bytes(self) -> int:
        """Size in bytes of this rank's share of the memory in which its node caches fetched units."""
        return self._transport.node_cache.rank_bytes if self._transport.node_cache else 0

    @property
    def peak_gradient_bytes(self) -> int:
        """Peak memory that this rank has used for gradient shards, local sums and pushes in flight, in bytes."""
        return self._transport.gradient_shard_bytes + self._pusher.buffers.peak_bytes

    @property
    def num_collectives(self) -> int:
        """Number of collectives so far: synchronization points, plus fetches and pushes if they are collective."""
        return self._transport.group.num_collectives

    @property
    def bytes_between_islands(self) -> int:
        """Bytes of gradients pushed to, and of parameters received from, other islands per minibatch; 0 without any."""
        exchange = self._transport.exchange
        return sum(map(Counter.total, exchange.bytes_per_minibatch())) if exchange else 0
