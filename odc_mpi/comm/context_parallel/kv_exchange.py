"""Keys and values of pieces of sequences in windows, and what the pieces of one sequence tell each other.

A sequence that is cut has a rank for each of its pieces. In each layer a piece shows its keys and values in its own
memory and later pieces read them there; in the backward a piece lays what it adds to the gradients of earlier pieces'
keys and values into its own memory, and these read it there. Memory is thus written by its owner alone, read in place
on a node and by MPI_Get from another one. Flags say what is ready:

    SHOWN   to later pieces: keys and values of the layers up to here can be read
    GIVEN   to earlier pieces: gradients of the layers down to here can be read
    TAKEN   to a later piece: its gradients of the layers down to here have been read, their slot is free
    READ    to earlier pieces: this piece is through with its backward, and reads no keys or values any more

A rank puts its flags into the memory of who waits for them, so that each looks at its own memory only. A flag is a
number that only grows, from sequence to sequence, too: nothing is ever reset, and a number of which not all bytes have
come is at most the new one (`comm.reduce.mailbox` says why).

Note: slots
    Keys and values have a slot for each layer, which is free when all later pieces have told READ. Gradients have two
    slots, used in turn by the layers, and a slot is free when all earlier pieces have told TAKEN for it.

Note: why nothing deadlocks
    Every rank runs its pieces in one order of sequences, the same on all ranks. Within a sequence, forward at a layer
    waits only for earlier pieces at this layer. Backward at a layer gives first, for which it waits only for TAKEN of
    layers above, and then takes, for which it waits only for later pieces that give at this layer. READ is waited for
    before the first layer of a rank's next sequence: all pieces of sequences before that one can end by then.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from odc_mpi.comm.context_parallel.kv_windows import (
    GRAD_CONSUMED,
    GRAD_READY,
    KV_READY,
    KV_RELEASED,
    MAX_LAYERS,
    KVPair,
    KVWindows,
)


class WindowKVExchange(AbstractContextManager["WindowKVExchange"]):
    """One piece's side of the exchange: a context in which its forward and backward run.

    Args:
        windows: Of this rank.
        sequence_number: Number of the sequence among all that were cut so far, from 1: the same on all ranks.
        bounds: Where the sequence's pieces begin and end, in tokens, `[pieces + 1]`.
        ranks: The rank of each piece.
        sequence: The sequence in words, for messages.
    """

    def __init__(
        self, windows: KVWindows, sequence_number: int, bounds: Sequence[int], ranks: Sequence[int], sequence: str
    ) -> None:
        self._windows = windows
        self._base = sequence_number * MAX_LAYERS
        self._bounds, self._ranks, self._sequence = tuple(bounds), tuple(ranks), sequence
        self._chunk = self._ranks.index(windows.world.rank)
        self._num_published = 0
        # Shapes, type and device of keys and values in each layer.
        self._like: list[KVPair] = []

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the others wait in vain, and the job ends.
        if kind is None:
            self.finish()

    def publish_kv(self, layer: int, kv: KVPair) -> None:
        """Let later pieces read keys and values; a second call for a layer, in a recomputation, does nothing.

        One-sided. At the first layer it waits until nobody reads this rank's last piece any more.
        """
        if layer < self._num_published:
            return
        assert layer == self._num_published < self._windows.sizes.num_layers, (
            f"layer {layer} comes after {self._num_published - 1}"
        )
        self._num_published += 1
        key, value = kv
        self._like.append((torch.empty_like(key[:, :, :1]), torch.empty_like(value[:, :, :1])))
        if layer == 0:
            self._windows.wait_until_free(self._windows.slot_offset(0), "its last piece")
        if self._later_ranks:
            end = self._windows.write(self._windows.slot_offset(layer), key)
            end = self._windows.write(end, value)
            assert end <= self._windows.slot_offset(layer + 1), f"{key.shape} and {value.shape} do not fit into a slot"
            self._set_flags(KV_READY, self._later_ranks, layer + 1, layer)

    def earlier_kv(self, layer: int) -> Iterator[KVPair]:
        """Yield keys and values of each earlier piece, in order, as soon as they are shown. One-sided, waits."""
        for piece in range(self._chunk):
            what = self._describe(piece, layer)
            self._windows.wait_for_flag(KV_READY, self._ranks[piece], self._base + layer + 1, what)
            yield self._read(piece, self._windows.slot_offset(layer), layer, piece)

    def send_kv_grads(self, layer: int, grads: Sequence[KVPair]) -> None:
        """Hand each earlier piece, in order, what this one adds to its gradients. One-sided, waits for room."""
        assert len(grads) == self._chunk
        if not grads:
            return
        slot = self._windows.gradient_slot_offset(layer)
        self._windows.wait_until_free(slot, f"a slot for {self._describe(self._chunk, layer)}")
        for piece, (key, value) in enumerate(grads):
            self._windows.write(self._windows.write(self._iter_gradients(piece, layer), key), value)
        number = self._num_done_backward(layer)
        self._windows.mark_busy_until(slot, GRAD_CONSUMED, self._earlier_ranks, self._base + number)
        self._set_flags(GRAD_READY, self._earlier_ranks, number, layer)

    def accumulate_kv_grads(self, layer: int, grads: KVPair) -> KVPair:
        """Return gradients with what all later pieces have given added, in their order. One-sided, waits."""
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total_key, total_value = (part.to(wide, copy=True) for part in grads)
        number = self._num_done_backward(layer)
        for piece, rank in enumerate(self._later_ranks, self._chunk + 1):
            self._windows.wait_for_flag(GRAD_READY, rank, self._base + number, self._describe(piece, layer))
            key, value = self._read(piece, self._iter_gradients(self._chunk, layer), layer, self._chunk)
            total_key += key
            total_value += value
            self._set_flags(GRAD_CONSUMED, [rank], number, layer)
        return total_key.to(grads[0].dtype), total_value.to(grads[1].dtype)

    def finish(self) -> None:
        """Tell earlier pieces that their keys and values are not read any more. One-sided."""
        self._set_flags(KV_RELEASED, self._earlier_ranks, 0, self._windows.sizes.num_layers - 1)
        if self._later_ranks:
            self._windows.mark_busy_until(self._windows.slot_offset(0), KV_RELEASED, self._later_ranks, self._base)
        self._windows.flush(f"ending {self._describe(self._chunk, 0)}")

    @property
    def _earlier_ranks(self) -> tuple[int, ...]:
        return self._ranks[: self._chunk]

    @property
    def _later_ranks(self) -> tuple[int, ...]:
        return self._ranks[self._chunk + 1 :]

    def _num_done_backward(self, layer: int) -> int:
        return self._windows.sizes.num_layers - layer

    def _iter_gradients(self, chunk: int, layer: int) -> int:
        """Return where gradients of an earlier piece begin in the memory of a later one."""
        token_bytes = sum(part.nbytes // part.shape[2] for part in self._like[layer])
        return self._windows.gradient_slot_offset(layer) + self._bounds[chunk] * token_bytes

    def _read(self, chunk: int, start: int, layer: int, of: int) -> KVPair:
        """Read, in the memory of a piece, keys and values, or gradients, that are those `of` another."""
        tokens = self._bounds[of + 1] - self._bounds[of]
        what = f"reading from {self._describe(chunk, layer)}"
        return self._windows.read(self._ranks[chunk], start, self._like[layer], tokens, what)

    def _set_flags(self, kind: int, ranks: Sequence[int], number: int, layer: int) -> None:
        self._windows.set_flags(
            kind, ranks, self._base + number, f"telling others of {self._describe(self._chunk, layer)}"
        )

    def _describe(self, chunk: int, layer: int) -> str:
        return f"piece {chunk + 1} of {len(self._ranks)} of {self._sequence}, layer {layer}"
