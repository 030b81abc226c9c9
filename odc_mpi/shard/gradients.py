"""Pushes of gradients to their owners.

Autograd's gradients of one call of a unit are laid into a buffer as the flat array has them, in `reduce_dtype`, and
added into the owners' shards. Only the stretch between the first and the last parameter with a gradient travels.
One push may be on its way while the next is prepared.
"""

import time
from collections.abc import Sequence

import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.transport import Pending, Transport
from odc_mpi.shard.layout import Slot
from odc_mpi.shard.unit import Unit


class GradientPusher:
    """Pushes the gradients of units.

    Args:
        transport: Reaches the owners.

    Attributes:
        finite: Whether every gradient pushed since `start` was finite.
        accumulate_wait_s: Seconds spent pushing since the beginning.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._buffers = BufferPool()
        self._on_the_way: tuple[Pending, torch.Tensor] | None = None
        self._open = False
        self.finite = True
        self.accumulate_wait_s = 0.0

    def start(self) -> None:
        """Allow pushes: a minibatch begins. Local."""
        self._open = True
        self.finite = True

    def push(self, unit: Unit, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
        """Start to add gradients into their owners' shards. One-sided.

        Args:
            unit: The unit.
            names: Of its parameters.
            gradients: In the same order, each of its parameter's shape; None where there is none.
        """
        if not self._open:
            raise RuntimeError("backward outside of `with model.minibatch():`, where owners do not expect gradients")
        arrays: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and gradient.numel():
                array, slot = unit.slots[name]
                arrays.setdefault(array, []).append((slot, gradient))
        for array, pieces in arrays.items():
            pieces.sort(key=lambda piece: piece[0].start)
            flat = self._flatten(pieces)
            low, high = torch.aminmax(flat)
            self.finite &= bool(torch.isfinite(low) & torch.isfinite(high))
            self._send(unit.indices[array], flat, pieces[0][0].start)

    def finish(self) -> None:
        """Wait until every push has left this rank; allow no more. One-sided."""
        self._wait()
        self._open = False

    def _flatten(self, pieces: Sequence[tuple[Slot, torch.Tensor]]) -> torch.Tensor:
        first, stop = pieces[0][0].start, pieces[-1][0].stop
        flat = self._buffers.take(stop - first, self._transport.reduce_dtype)
        filled = 0
        for slot, gradient in pieces:
            start = slot.start - first
            flat[filled:start].zero_()
            filled = start + slot.spec.numel
            # One pass casts, lays out and makes contiguous.
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            flat[start:filled].view(slot.spec.shape).copy_(dense)
        return flat

    def _send(self, index: int, flat: torch.Tensor, start: int) -> None:
        self._wait()
        began = time.perf_counter()
        self._on_the_way = self._transport.accumulate(index, flat, start), flat
        self.accumulate_wait_s += time.perf_counter() - began

    def _wait(self) -> None:
        if self._on_the_way is None:
            return
        began = time.perf_counter()
        pending, flat = self._on_the_way
        pending.wait()
        self._on_the_way = None
        self._buffers.give_back(flat)
        self.accumulate_wait_s += time.perf_counter() - began
