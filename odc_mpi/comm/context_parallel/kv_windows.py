"""Windows and flags through which `comm.context_parallel.kv_exchange` exchanges keys, values and their gradients.

The windows are in host memory. A GPU copies to them after the kernels that compute the data, and from them before the
kernels that use it. Flags set while copies are in flight are held back until `complete_copies` has waited for the
copies: other ranks may read only data that has arrived in a window, and overwrite only data that was copied from it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, copy_host, empty_host
from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import SharedWindow, Window, align_up, messages
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Kinds of flags (see `comm.context_parallel.kv_exchange`).
KV_READY, GRAD_READY, GRAD_CONSUMED, KV_RELEASED = range(4)
_FLAG_NAMES = ("keys and values", "gradients of keys and values", "room for gradients", "end")
#: Upper bound on the number of layers. The value of a flag is `sequence_number * MAX_LAYERS + layers_done`.
MAX_LAYERS = 1 << 20
#: Number of slots for gradients. A rank fills one while other ranks read from the other.
_GRADIENT_SLOTS = 2

#: Keys and values of a chunk in one layer, or their gradients, each `[1, key_value_heads, tokens, head_dim]`.
KVPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KVSizes:
    """Sizes that determine how much memory `KVWindows` allocates on each rank.

    Attributes:
        token_bytes: Size of the keys and values of one token in one layer, in bytes.
        max_earlier_tokens: Maximum number of tokens that precede a chunk in its sequence.
    """

    num_layers: int
    token_bytes: int
    max_chunk_tokens: int
    max_earlier_tokens: int

    @property
    def slot_bytes(self) -> int:
        """Size in bytes of a slot for one layer's keys and values."""
        return align_up(self.max_chunk_tokens * self.token_bytes)

    @property
    def gradient_slot_bytes(self) -> int:
        """Size in bytes of a slot for one layer's gradients for all earlier chunks."""
        return align_up(self.max_earlier_tokens * self.token_bytes)

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of all slots."""
        return self.num_layers * self.slot_bytes + _GRADIENT_SLOTS * self.gradient_slot_bytes


class KVWindows:
    """MPI windows for the keys, values and gradients that this rank publishes, and for flags.

    Construction is collective and raises `AllRanksUserError` on all ranks if a node has too little memory.

    Args:
        sizes: Sizes of the slots. Must be the same on all ranks.
        shared: If True, ranks on the same node map each other's memory and read it directly.
        device: GPU of the keys and values, or None if they are on the host.

    Attributes:
        waited_s: Total time that this rank has waited for flags, in seconds.
    """

    def __init__(self, world: World, sizes: KVSizes, *, shared: bool, device: Device | None = None) -> None:
        assert 0 < sizes.num_layers < MAX_LAYERS
        self.world, self.sizes = world, sizes
        world.require_shared_memory(sizes.num_bytes, "the keys and values of split sequences")
        self._memory = (SharedWindow if shared else Window)(world, sizes.num_bytes, torch.uint8)
        self._flags = Window(world, len(_FLAG_NAMES) * world.size, torch.int64)
        self._flag_values = self._flags.tensor.numpy()
        # Origin buffers of the last Put of each flag. They must not change before a flush.
        self._outgoing = np.zeros(len(_FLAG_NAMES) * world.size, dtype=np.int64)
        self._unflushed: set[int] = set()
        # Flags (kind, rank, value) to wait for before a slot is free, by the offset of the slot.
        self._busy_until: dict[int, list[tuple[int, int, int]]] = {}
        self._device = device
        # If the driver refuses to pin this memory, for example because another array shares a page, the CPU copies.
        mapped = self._memory.mapped_memory
        self._pinned = mapped if device is not None and device.register(mapped) else None
        self._pool = BufferPool(empty_host if device is None else device.empty_pinned)
        # Events of copies in flight with the memory that must not be reused before, and flags that wait for them.
        self._copies: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self._held_flags: list[tuple[int, Sequence[int], int, str]] = []
        self.waited_s = 0.0
        self._open = True
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "clearing the flags of chunks")

    def close(self) -> None:
        """Free the windows. Collective. Idempotent."""
        if self._open:
            self._open = False
            del self._flag_values
            self._finish_copies()
            if self._device is not None and self._pinned is not None:
                self._device.unregister(self._pinned)
                self._pinned = None
            with self.world.collective("freeing the windows of chunks"):
                self._flags.free()
                self._memory.free()
            self.world.cancel_on_close(self.close)

    def slot_offset(self, layer: int) -> int:
        """Return the byte offset in the window of the slot for the keys and values of `layer`."""
        return layer * self.sizes.slot_bytes

    def gradient_slot_offset(self, layer: int) -> int:
        """Return the byte offset in the window of the gradient slot for `layer`. Layers alternate between two slots."""
        slot = layer % _GRADIENT_SLOTS
        return self.slot_offset(self.sizes.num_layers) + slot * self.sizes.gradient_slot_bytes

    def mark_busy_until(self, slot: int, kind: int, ranks: Sequence[int], value: int) -> None:
        """Record that the slot at byte `slot` is in use until flag `kind` of each rank in `ranks` is at least `value`.

        Byte 0 represents all key and value slots.
        """
        self._busy_until[slot] = [(kind, rank, value) for rank in ranks]

    def wait_until_free(self, slot: int, what: str) -> None:
        """Wait for the flags that `mark_busy_until` recorded for a slot. One-sided. Messages call the slot `what`."""
        for kind, rank, value in self._busy_until.pop(slot, ()):
            self.wait_for_flag(kind, rank, value, what)

    def write(self, start: int, tensor: torch.Tensor) -> int:
        """Start copying a tensor into this rank's window at byte offset `start`, and return the end offset."""
        stop = start + tensor.nbytes
        window = self._memory.tensor[start:stop]
        if self._device is None:
            window.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return stop
        source = tensor.contiguous().view(-1).view(torch.uint8)
        buffer = window if self._pinned is not None else self._acquire(tensor.nbytes)
        copied = self._device.copy(buffer, source, self._device.record_event())
        if buffer is window:
            self._copies.append((copied, source))
        else:
            copied.synchronize()
            copy_host(window, buffer)
        return stop

    def read(self, rank: int, start: int, template: KVPair, tokens: int, what: str) -> KVPair:
        """Read keys and values, or their gradients, from the window of `rank` at byte offset `start`. One-sided.

        The result has the device, dtypes and shapes of `template`, except for the number of tokens, which is `tokens`.
        It is a view if this rank maps the window and `template` is on the host.
        """
        shapes = [(*part.shape[:2], tokens, part.shape[3]) for part in template]
        sizes = [part.nbytes // part.shape[2] * tokens for part in template]
        self._memory.sync()  # no load of data may precede the load of the flag
        shard = self._memory.mapped_shard(rank)
        if shard is not None:
            data = shard[start : start + sum(sizes)]
        else:
            data = self._acquire(sum(sizes))
            with self.world.deadline(what, [rank]):
                self._memory.get_messages(data.numpy(), messages(rank, start, data.numel()))
                self._memory.flush()
        if self._device is not None:
            source = data
            if shard is not None and self._pinned is None:
                source = self._acquire(data.numel())
                copy_host(source, data)
            data, copied = self._device.upload(source)
            self._copies.append((copied, source))
        parts = zip(data.split(sizes), shapes, template, strict=True)
        key, value = (part.view(like.dtype).view(shape) for part, shape, like in parts)
        return key, value

    def set_flags(self, kind: int, ranks: Sequence[int], value: int, what: str) -> None:
        """Start setting this rank's flag of kind `kind` to `value` on each rank in `ranks`. One-sided.

        While copies are in flight, this only schedules the flags for the next `complete_copies`.
        """
        if self._copies:
            self._held_flags.append((kind, ranks, value, what))
            return
        self._memory.sync()
        for rank in ranks:
            i = kind * self.world.size + rank
            with self.world.deadline(what, [rank]):
                if rank in self._unflushed:  # usually complete by now
                    self._flags.flush(rank)
                self._outgoing[i] = value
                target_index = kind * self.world.size + self.world.rank
                self._flags.put_messages(self._outgoing, messages(rank, target_index, 1, i))
                self._unflushed.add(rank)
        # Over a network, a Put may not leave before a later MPI call.
        self.world.comm.Iprobe()

    def complete_copies(self) -> None:
        """Wait for the copies to and from a GPU, and start setting the flags that were held back. One-sided.

        Call this before this rank waits for another rank, which may itself be waiting for these flags.
        """
        self._finish_copies()
        flags, self._held_flags = self._held_flags, []
        for kind, ranks, value, what in flags:
            self.set_flags(kind, ranks, value, what)

    def flush(self, what: str) -> None:
        """Wait until all flags set by this rank have arrived. One-sided. `what` describes the wait in messages."""
        self.complete_copies()
        with self.world.deadline(what, self._unflushed):
            for rank in self._unflushed:
                self._flags.flush(rank)
        self._unflushed.clear()

    def wait_for_flag(self, kind: int, rank: int, value: int, what: str) -> None:
        """Wait until `rank` has set its flag of kind `kind` on this rank to at least `value`. One-sided.

        `what` describes the chunk or slot in messages.
        """

        def is_set() -> bool:
            self._flags.sync()
            return bool(self._flag_values[kind * self.world.size + rank] >= value)

        if not is_set():
            self.complete_copies()
            began = time.perf_counter()
            with self.world.deadline(f"waiting for the {_FLAG_NAMES[kind]} of {what}", [rank]):
                wait_until(is_set, self.world.progress.poke)
            self.waited_s += time.perf_counter() - began

    def _acquire(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that is reused once unreferenced, `[num_bytes]` uint8, pinned if there is a GPU."""
        buffer = self._pool.acquire(num_bytes, torch.uint8)
        self._pool.release(buffer)
        return buffer

    def _finish_copies(self) -> None:
        for event, _ in self._copies:
            event.synchronize()
        self._copies.clear()
