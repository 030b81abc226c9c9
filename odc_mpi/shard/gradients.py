"""Pushing of gradients to the ranks that own them.

The gradients from one backward pass of a unit are copied in `reduce_dtype` into a buffer with the layout of the flat
array (`shard.gradient_format`), and added to the owners' shards. Only the range from the first to the last parameter
with a gradient is sent. A push is in flight while the next gradient is computed and copied. If the transport allows it,
pushes run on a thread, and several of them may be in flight (`num_push_buffers`).

If an array fits into the budget (`shard.cache_budget`), its gradients are accumulated locally, in one pass over each.
Their sum is pushed once: at the end of the minibatch, or in the last backward pass, as soon as it is complete. If a
single rank owns all shards, on the model's device, gradients are accumulated in the shards themselves.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.transport import Transport
from odc_mpi.comm.work import Work
from odc_mpi.shard.cache_budget import CacheBudget
from odc_mpi.shard.fixed_point import FixedPointGradients
from odc_mpi.shard.gradient_format import FloatGradients, GradientFormat
from odc_mpi.shard.prefetch import CommunicationThread
from odc_mpi.shard.spans import SpanRecorder
from odc_mpi.shard.units.unit import Unit


def num_push_buffers(prefetch: int) -> int:
    """Return the number of gradient buffers: one that is being filled, and one for each push in flight.

    At most max(1, `prefetch`) pushes are in flight.
    """
    return max(2, prefetch + 1)


@dataclass
class AccumulatedGradient:
    """Local sum of a flat array's gradients, `[numel]`. Elements outside `[start, stop)` are zero."""

    flat: torch.Tensor
    start: int
    stop: int


class GradientPusher:
    """Accumulator that sums gradients locally if the budget allows, and pushes them to their owners.

    Args:
        prefetch: Maximum number of pushes in flight, which run on a separate thread. If `prefetch` is 0 or the
            transport is not thread-safe, no thread is used and at most one push is in flight.

    Attributes:
        gradient_format: Number format of the gradients, which is fixed-point if the store has an integer dtype.
        cache: Memory budget for local sums. Unused if pushes stay on this rank.
        is_last_backward: True if the current or next backward pass is the last one in this minibatch. Set by the model.
        parameters_with_gradient: Names of the parameters that have received a gradient since `start`.
    """

    def __init__(self, transport: Transport, prefetch: int, spans: SpanRecorder) -> None:
        self.cache = CacheBudget()
        self._store, self._finish_arrays = transport.gradients, transport.finish_arrays
        # Arrays that this rank has finished (`Transport.finish_arrays`), and the handles for these calls.
        self._finished: set[int] = set()
        self._finishing: list[Work] = []
        layouts, dtype = transport.parameters.layouts, self._store.dtype
        self.gradient_format: GradientFormat = (
            FloatGradients(dtype)
            if dtype.is_floating_point
            else FixedPointGradients({i: layout.numel for i, layout in enumerate(layouts) if layout.trainable})
        )
        self._spans = spans
        prefetch = prefetch if transport.thread_safe else 0
        self._thread = CommunicationThread("odc_mpi-push") if prefetch else None
        self._max_in_flight = num_push_buffers(prefetch) - 1
        self.buffers = BufferPool(transport.gradients.empty)
        self._in_flight: deque[tuple[Work, torch.Tensor, int]] = deque()
        self._accumulated: dict[int, AccumulatedGradient] = {}
        self._open = False
        self.is_last_backward = False
        self.parameters_with_gradient: set[str] = set()

    def start(self) -> None:
        """Start a minibatch. `push` may then be called until `finish` is called."""
        self._open = True
        self.is_last_backward = False
        self.gradient_format.start()
        self.parameters_with_gradient = set()
        self._finished.clear()
        self._finishing.clear()

    def push(
        self, unit: Unit, names: Sequence[str], gradients: Sequence[torch.Tensor | None], is_last_forward: bool = False
    ) -> None:
        """Add the gradients of the named parameters to local sums, or start pushing them to their owners. One-sided.

        Each gradient has the shape of its parameter, or is None if the parameter was not used. `is_last_forward` is
        True if no other forward pass of the unit is still awaiting its backward pass. Raises RuntimeError outside a
        minibatch, or if this rank has already finished one of the unit's arrays (`Transport.finish_arrays`).
        """
        if not self._open:
            raise RuntimeError("backward outside of `with model.minibatch():`, where owners do not expect gradients")
        arrays: dict[int, list[Segment]] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue
            self.parameters_with_gradient.add(name)
            if gradient.numel():
                array, range_ = unit.ranges[name]
                arrays.setdefault(array, []).append((range_.start, gradient))
        for array, segments in arrays.items():
            segments.sort(key=itemgetter(0))
            if unit.indices[array] in self._finished:
                raise RuntimeError(
                    "expected no backward after the one announced by set_is_last_backward(), got gradients of unit "
                    f"{unit.name or '(root)'}, which are too late for other islands: call it before the last backward"
                )
            index, start, stop = unit.indices[array], segments[0][0], segments[-1][0] + segments[-1][1].numel()
            accumulated = self._accumulator_for(index, unit.layouts[array].numel)
            if accumulated is None:
                self._start_push(index, self._write_flat(index, segments, start, stop), start)
                continue
            self.gradient_format.accumulate(index, segments, accumulated.flat)
            accumulated.start, accumulated.stop = min(accumulated.start, start), max(accumulated.stop, stop)
            if self.is_last_backward:
                self._push_accumulated(index)
        if is_last_forward and self.is_last_backward and self._finish_arrays and self._thread:
            complete = [index for index in unit.indices if index not in self._accumulated]
            self._finished.update(complete)
            self._finishing.append(self._thread.start(self._finish_arrays, complete))

    def finish(self) -> None:
        """Push the local sums, wait until the buffers of all pushes may be reused, and end the minibatch.

        One-sided. Idempotent.
        """
        for index in list(self._accumulated):
            self._push_accumulated(index)
        self._wait(0)
        for finishing in self._finishing:
            finishing.wait()
        self._open = False

    def close(self) -> None:
        """Complete the pushes on the push thread, if there is one, and end the thread. One-sided. Idempotent."""
        if self._thread is not None:
            self._thread.close()

    def _accumulator_for(self, index: int, numel: int) -> AccumulatedGradient | None:
        """Return the local sum for array `index`, or None if its gradient must be pushed on its own."""
        if index in self._accumulated:
            return self._accumulated[index]
        if self._store.is_local:
            self._accumulated[index] = AccumulatedGradient(self._store.shard(index), numel, 0)
            return self._accumulated[index]
        if self.is_last_backward or not self.cache.fits(numel * self._store.dtype.itemsize):
            return None
        flat = self.buffers.acquire(numel, self._store.dtype)
        # A reused buffer may be larger than requested.
        if not self.cache.admit(index, flat.untyped_storage().nbytes()):
            self.buffers.release(flat)
            return None
        self._accumulated[index] = AccumulatedGradient(flat.zero_(), numel, 0)
        return self._accumulated[index]

    def _push_accumulated(self, index: int) -> None:
        self._wait(self._max_in_flight)  # a push in flight may take up additional memory, such as pinned memory
        accumulated = self._accumulated.pop(index)
        flat = accumulated.flat[accumulated.start : accumulated.stop]
        self.gradient_format.note_push(index, flat)
        if self._store.is_local:
            return
        self._start_push(index, flat, accumulated.start)

    def _write_flat(self, index: int, segments: Sequence[Segment], first: int, stop: int) -> torch.Tensor:
        self._wait(self._max_in_flight)
        flat = self.buffers.acquire(stop - first, self._store.dtype)
        self.gradient_format.write_flat(index, [(start - first, gradient) for start, gradient in segments], flat)
        return flat

    def _start_push(self, index: int, flat: torch.Tensor, start: int) -> None:
        push = self._store.push
        with self._spans.span("accumulate"):
            self._store.prepare_push(flat)
            pending = self._thread.start(push, index, flat, start) if self._thread else push(index, flat, start)
        self._in_flight.append((pending, flat, index))

    def _wait(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            pending, flat, index = self._in_flight.popleft()
            with self._spans.span("accumulate"):
                pending.wait()
            self.buffers.release(flat)
            if index not in self._accumulated:
                self.cache.discard(index)
