"""Exchange of keys, values and their gradients between the ranks of a split sequence (context parallelism).

A split sequence is divided into chunks of tokens, one per rank. In every attention layer, a rank writes the keys and
values of its chunk to its own window, and the ranks with later chunks read them. In the backward pass, a rank writes
its contributions to the gradients of earlier chunks' keys and values to its own window, and the ranks with those chunks
read them. Only the owner of a window thus writes tensors to it. Ranks on the same node read the window directly, and
other ranks use MPI_Get. Four kinds of flags synchronize the ranks:

    KV_READY        to later chunks: keys and values can be read, up to the layer in the flag
    GRAD_READY      to earlier chunks: gradients can be read, down to the layer in the flag
    GRAD_CONSUMED   to a later chunk: gradients from that chunk have been read, down to the layer in the flag
    KV_RELEASED     to earlier chunks: this rank has finished its backward pass and reads no more keys and values

A rank Puts a flag into the window of the rank that waits for it, so every rank polls only its own memory. Flags are
integers that never decrease, even from one sequence to the next. They therefore need no reset, and a torn read returns
at most the new value (see `comm.reduce.mailbox`).

Note: slots
    Keys and values have one slot per layer. These slots become free after KV_RELEASED from all later chunks. Gradients
    have two slots, which alternate between layers. Each becomes free after GRAD_CONSUMED from all earlier chunks.

Note: deadlock freedom
    All ranks process split sequences in the same order. Within a sequence, the forward pass of a layer waits only for
    earlier chunks in the same layer. The backward pass of a layer first publishes gradients, for which it waits only
    for GRAD_CONSUMED of higher layers. It then reads gradients, for which it waits only for later chunks to publish
    theirs in the same layer. A rank waits for KV_RELEASED before the first layer of its next sequence, when all chunks
    of earlier sequences can already finish.
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
    """Context manager for the forward and backward passes over this rank's chunk of a split sequence.

    Args:
        sequence_number: Number of this split sequence, starting at 1. Must be the same on all ranks.
        bounds: Token offsets of the chunk boundaries, `[chunks + 1]`, including 0 and the sequence length.
        ranks: Ranks that process the chunks, including this rank, in chunk order.
        sequence_name: Name of the sequence, for messages.
    """

    def __init__(
        self, windows: KVWindows, sequence_number: int, bounds: Sequence[int], ranks: Sequence[int], sequence_name: str
    ) -> None:
        self._windows = windows
        self._base = sequence_number * MAX_LAYERS
        self._bounds, self._ranks, self._sequence = tuple(bounds), tuple(ranks), sequence_name
        self._chunk = self._ranks.index(windows.world.rank)
        self._earlier_ranks, self._later_ranks = self._ranks[: self._chunk], self._ranks[self._chunk + 1 :]
        self._num_published = 0
        # Keys and values of one token in each layer, for their shapes, dtype and device.
        self._templates: list[KVPair] = []

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception, the other ranks wait until their deadline, which ends the job.
        if kind is None:
            self.finish()

    def publish_kv(self, layer: int, kv: KVPair) -> None:
        """Make this chunk's keys and values from a layer available to later chunks. One-sided.

        Raises RuntimeError if a layer is skipped or `kv` does not fit into a slot. Repeated calls, as in recomputation,
        have no effect. The call for layer 0 waits until no rank is still reading this rank's previous chunk.
        """
        if layer < self._num_published:
            return
        if not layer == self._num_published < self._windows.sizes.num_layers:
            raise RuntimeError(f"layer {layer} follows layer {self._num_published - 1}")
        self._num_published += 1
        key, value = kv
        self._templates.append((torch.empty_like(key[:, :, :1]), torch.empty_like(value[:, :, :1])))
        if layer == 0:
            self._windows.wait_until_free(self._windows.slot_offset(0), "its previous chunk")
        if self._later_ranks:
            end = self._windows.write(self._windows.slot_offset(layer), key)
            end = self._windows.write(end, value)
            if end > self._windows.slot_offset(layer + 1):
                raise RuntimeError(f"{key.shape} and {value.shape} do not fit into a slot")
            self._set_flags(KV_READY, self._later_ranks, layer + 1, layer)

    def earlier_kv(self, layer: int) -> Iterator[KVPair]:
        """Yield a layer's keys and values for each earlier chunk, in chunk order. One-sided."""
        self._windows.complete_copies()
        for chunk in range(self._chunk):
            what = self._describe(chunk, layer)
            self._windows.wait_for_flag(KV_READY, self._ranks[chunk], self._base + layer + 1, what)
            yield self._read(chunk, self._windows.slot_offset(layer), layer, chunk)

    def send_kv_grads(self, layer: int, grads: Sequence[KVPair]) -> None:
        """Publish this rank's contributions to the gradients of earlier chunks' keys and values. One-sided.

        Waits for a free slot. `grads` contains one pair of tensors per earlier chunk, in chunk order.
        """
        assert len(grads) == self._chunk
        if not grads:
            return
        slot = self._windows.gradient_slot_offset(layer)
        self._windows.wait_until_free(slot, f"a slot for {self._describe(self._chunk, layer)}")
        for chunk, (key, value) in enumerate(grads):
            self._windows.write(self._windows.write(self._gradient_offset(chunk, layer), key), value)
        number = self._num_done_backward(layer)
        self._windows.mark_busy_until(slot, GRAD_CONSUMED, self._earlier_ranks, self._base + number)
        self._set_flags(GRAD_READY, self._earlier_ranks, number, layer)

    def accumulate_kv_grads(self, layer: int, grads: KVPair) -> KVPair:
        """Return `grads`, the gradients of this chunk's keys and values, plus later chunks' contributions. One-sided.

        Waits for the contributions and adds them in chunk order, in float32 or in the dtype of `grads` if that is
        wider. The result has the dtype of `grads`.
        """
        self._windows.complete_copies()
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total_key, total_value = (part.to(wide, copy=True) for part in grads)
        number = self._num_done_backward(layer)
        for chunk, rank in enumerate(self._later_ranks, self._chunk + 1):
            self._windows.wait_for_flag(GRAD_READY, rank, self._base + number, self._describe(chunk, layer))
            key, value = self._read(chunk, self._gradient_offset(self._chunk, layer), layer, self._chunk)
            total_key += key
            total_value += value
            self._set_flags(GRAD_CONSUMED, [rank], number, layer)
        return total_key.to(grads[0].dtype), total_value.to(grads[1].dtype)

    def finish(self) -> None:
        """Notify the ranks with earlier chunks that this rank will read no more keys and values. One-sided."""
        self._set_flags(KV_RELEASED, self._earlier_ranks, 0, self._windows.sizes.num_layers - 1)
        if self._later_ranks:
            self._windows.mark_busy_until(self._windows.slot_offset(0), KV_RELEASED, self._later_ranks, self._base)
        self._windows.flush(f"ending {self._describe(self._chunk, 0)}")

    def _num_done_backward(self, layer: int) -> int:
        return self._windows.sizes.num_layers - layer

    def _gradient_offset(self, chunk: int, layer: int) -> int:
        token_bytes = sum(part.nbytes for part in self._templates[layer])
        return self._windows.gradient_slot_offset(layer) + self._bounds[chunk] * token_bytes

    def _read(self, chunk: int, start: int, layer: int, contents: int) -> KVPair:
        """Read the keys and values of chunk `contents`, or their gradients, from the window of chunk `chunk`."""
        tokens = self._bounds[contents + 1] - self._bounds[contents]
        what = f"reading from {self._describe(chunk, layer)}"
        return self._windows.read(self._ranks[chunk], start, self._templates[layer], tokens, what)

    def _set_flags(self, kind: int, ranks: Sequence[int], number: int, layer: int) -> None:
        what = f"setting flags for {self._describe(self._chunk, layer)}"
        self._windows.set_flags(kind, ranks, self._base + number, what)

    def _describe(self, chunk: int, layer: int) -> str:
        return f"chunk {chunk + 1} of {len(self._ranks)} of {self._sequence}, layer {layer}"
