"""Pushes of gradients to their owners.

Autograd's gradients of one call of a unit are laid into a buffer as the flat array has them, in `reduce_dtype`
(`shard.gradient_format`), and added into the owners' shards. Only the stretch between the first and the last parameter with a
gradient travels. A push is on its way while the next gradient is computed and laid out; in a thread where the transport
allows it.

As far as a budget goes (`shard.cache_budget`), gradients of an array are added up here instead, one pass over each, and
the sum is pushed once: before A, or in the last backward as soon as the gradient of the array has come.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.transport import Transport
from odc_mpi.comm.work import Work
from odc_mpi.shard.cache_budget import CacheBudget
from odc_mpi.shard.gradient_format import FloatGradients, GradientFormat
from odc_mpi.shard.prefetch import CommunicationThread
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.shard.units.unit import Unit

#: Buffers for gradients: pushes on their way, and the one that is being filled.
MAX_BUFFERS = 2


@dataclass
class AccumulatedGradient:
    """Gradients of an array, added up at home: `[numel]`, zero beyond elements `start` to `stop`."""

    flat: torch.Tensor
    start: int
    stop: int


class GradientPusher:
    """Pushes the gradients of units.

    Args:
        transport: Reaches the owners.
        in_thread: Push from a thread, unless one thread only may call the transport.
        spans: Told when the computation pushes, or waits for pushes.
        traffic: Told of every push.
        gradient_format: What gradients are pushed and added up as; None: floating-point numbers of the store's type.

    Attributes:
        gradient_format: As given.
        residency: Which arrays' gradients are added up here; none, where pushes go nowhere or are collective.
        is_last_backward: Whether no other backward of this minibatch follows.
        parameters_with_gradient: Of the parameters that got a gradient since `start`.
    """

    def __init__(
        self,
        transport: Transport,
        in_thread: bool = False,
        spans: SpanRecorder | None = None,
        traffic: TrafficCounter | None = None,
        gradient_format: GradientFormat | None = None,
    ) -> None:
        self.residency = CacheBudget()
        self._store = transport.gradients
        self.gradient_format = gradient_format or FloatGradients(self._store.dtype)
        self._spans = spans or SpanRecorder()
        self._traffic = traffic or TrafficCounter(transport)
        self._thread = CommunicationThread("odc_mpi-push") if in_thread and transport.threads else None
        self._buffers = BufferPool(transport.gradients.empty)
        self._in_flight: deque[tuple[Work, torch.Tensor, int]] = deque()
        self._accumulated: dict[int, AccumulatedGradient] = {}
        self._open = False
        self.is_last_backward = False
        self.parameters_with_gradient: set[str] = set()

    @property
    def peak_buffer_bytes(self) -> int:
        """The most bytes that gradients ever took here, on their way and added up."""
        return self._buffers.peak_bytes

    def start(self) -> None:
        """Allow pushes: a minibatch begins."""
        self._open = True
        self.is_last_backward = False
        self.gradient_format.start()
        self.parameters_with_gradient = set()

    def push(self, unit: Unit, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
        """Start to add gradients into their owners' shards. One-sided.

        Args:
            unit: The unit.
            names: Of its parameters.
            gradients: In the same order, each of its parameter's shape; None where there is none.
        """
        if not self._open:
            raise RuntimeError("backward outside of `with model.minibatch():`, where owners do not expect gradients")
        arrays: dict[int, list[Segment]] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue
            self.parameters_with_gradient.add(name)
            if gradient.numel():
                array, slot = unit.ranges[name]
                arrays.setdefault(array, []).append((slot.start, gradient))
        for array, segments in arrays.items():
            segments.sort(key=itemgetter(0))
            index, start, stop = unit.indices[array], segments[0][0], segments[-1][0] + segments[-1][1].numel()
            if (kept := self._accumulator_for(index, unit.layouts[array].numel)) is None:
                self._start_push(index, self._write_flat(index, segments, start, stop), start)
                continue
            self.gradient_format.accumulate(index, segments, kept.flat)
            kept.start, kept.stop = min(kept.start, start), max(kept.stop, stop)
            if self.is_last_backward:
                self._push_accumulated(index)

    def finish(self) -> None:
        """Push what was added up, and wait until every push has left this rank; allow no more. One-sided."""
        for index in list(self._accumulated):
            self._push_accumulated(index)
        self._wait(0)
        self._open = False

    def clear(self) -> None:
        """Let go of all memory that is not in use."""
        self._buffers.clear()

    def close(self) -> None:
        """Complete what is on its way and end the thread. One-sided; a second call does nothing."""
        if self._thread is not None:
            self._thread.close()

    def _accumulator_for(self, index: int, numel: int) -> AccumulatedGradient | None:
        """Return the sum that a gradient of an array is to be added to; None if it is to be pushed by itself."""
        if index in self._accumulated:
            return self._accumulated[index]
        if self.is_last_backward or not self.residency.fits(numel * self._store.dtype.itemsize):
            return None
        flat = self._buffers.acquire(numel, self._store.dtype)
        # A buffer that was used before may be larger than what it is for.
        if not self.residency.admit(index, flat.untyped_storage().nbytes()):
            self._buffers.release(flat)
            return None
        self._accumulated[index] = AccumulatedGradient(flat.zero_(), numel, 0)
        return self._accumulated[index]

    def _push_accumulated(self, index: int) -> None:
        if self._thread is None:
            self._wait(MAX_BUFFERS - 1)  # a push that is on its way may take memory of its own, such as pinned memory
        done = self._accumulated.pop(index)
        flat = done.flat[done.start : done.stop]
        self.gradient_format.note_push(index, flat)
        self._start_push(index, flat, done.start)

    def _write_flat(self, index: int, segments: Sequence[Segment], first: int, stop: int) -> torch.Tensor:
        """Lay gradients into a buffer, and note how large they are, without asking: a device tells when it is done."""
        self._wait(MAX_BUFFERS - 1)
        flat = self._buffers.acquire(stop - first, self._store.dtype)
        self.gradient_format.write_flat(index, [(start - first, gradient) for start, gradient in segments], flat)
        return flat

    def _start_push(self, index: int, flat: torch.Tensor, start: int) -> None:
        began = time.perf_counter()
        push = self._store.push
        self._store.record_event(flat)
        pending = self._thread.start(push, index, flat, start) if self._thread else push(index, flat, start)
        self._in_flight.append((pending, flat, index))
        self._traffic.add_push(index, start, start + flat.numel())
        self._spans.add("accumulate", began)

    def _wait(self, num_left: int) -> None:
        """Wait for the oldest pushes until at most so many are on their way."""
        while len(self._in_flight) > num_left:
            began = time.perf_counter()
            pending, flat, index = self._in_flight.popleft()
            pending.wait()
            self._buffers.release(flat)
            if index not in self._accumulated:
                self.residency.discard(index)
            self._spans.add("accumulate", began)
