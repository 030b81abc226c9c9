"""Time, memory and collectives that a rank uses. This module does not communicate.

The time of the computing thread is recorded in spans. Communication spans do not overlap each other:

    fetch                  waiting for parameters
    accumulate             starting pushes, and waiting for pushes
    values_gathered, gradients_complete, grad_norm, parameters_published
                           waiting at the synchronization points

Activity spans do not overlap each other, either, but include any communication during the activity:

    generate, rollout_wait generating completions with their rewards, and waiting for other ranks' completions
    optimize, outer_sync   the optimizer step, and synchronizing islands that train separately
    evaluate, save         evaluating, and copying the state for a checkpoint

Sharding spans count only toward the total times:

    windows, weights       allocating the windows, and loading the parameters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.transport import Transport

#: Synchronization points of a step, in order: K, A, N and B in docs/ordering.md.
SYNC_POINTS = ("values_gathered", "gradients_complete", "grad_norm", "parameters_published")
ACTIVITIES = ("generate", "rollout_wait", "optimize", "outer_sync", "evaluate", "save")
SHARDING = ("windows", "weights")
#: Kinds of spans, as described in the module docstring.
SPAN_KINDS = ("fetch", "accumulate", *SYNC_POINTS, *ACTIVITIES)


class Span(NamedTuple):
    """Time interval whose `kind` is in `SPAN_KINDS`. Its ends are values of `time.perf_counter`, in seconds."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Recorder for time intervals (spans) in which the computing thread communicates or does something else.

    `seconds` maps each kind of span to the total time of all such spans so far, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*SPAN_KINDS, *SHARDING), 0.0)
        self._is_recording = False
        self._recorded: list[Span] = []

    def add(self, kind: str, began: float) -> None:
        """Add a span that began at `began`, a value of `time.perf_counter`, and ends now."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._is_recording:
            self._recorded.append(Span(kind, began, ended))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Context manager that adds a span for the enclosed code, even if the code raises an exception."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(kind, began)

    def start_recording(self) -> None:
        """Keep every span from now on. Call `drain` regularly to free the memory of the spans."""
        self._is_recording = True

    def drain(self) -> list[Span]:
        """Remove the spans recorded since the last call, and return them in order."""
        recorded, self._recorded = self._recorded, []
        return recorded


class Usage:
    """Time, memory and synchronization points that this rank has used since the model was constructed."""

    def __init__(self, transport: Transport, spans: SpanRecorder, push_buffers: BufferPool) -> None:
        self._transport, self._spans, self._push_buffers = transport, spans, push_buffers

    @property
    def boundary_wait_s(self) -> float:
        """Total time that this rank has waited at synchronization points, in seconds."""
        return sum(self._spans.seconds[point] for point in SYNC_POINTS)

    @property
    def island_wait_s(self) -> float:
        """The part of `boundary_wait_s` spent waiting in `comm.islands`, in seconds; 0 without islands."""
        return self._transport.island_wait_s

    @property
    def peak_parameter_bytes(self) -> int:
        """Peak memory that this rank has used for parameter shards and fetched units, in bytes."""
        parameters = self._transport.parameters
        return parameters.shard_bytes + self.node_cache_bytes + parameters.buffers.peak_bytes

    @property
    def node_cache_bytes(self) -> int:
        """Size in bytes of this rank's share of the memory in which its node caches fetched units."""
        return self._transport.node_cache_bytes

    @property
    def peak_gradient_bytes(self) -> int:
        """Peak memory that this rank has used for gradient shards, local sums and pushes in flight, in bytes."""
        return self._transport.gradient_shard_bytes + self._push_buffers.peak_bytes

    @property
    def num_collectives(self) -> int:
        """Number of synchronization points so far."""
        return self._transport.group.num_collectives

    @property
    def bytes_between_islands(self) -> int:
        """Bytes of gradients sent to, and parameters received from, other islands per minibatch; 0 without islands."""
        return self._transport.bytes_between_islands
