"""Memory of the pieces of sequences on a rank, with flags: what `comm.context_parallel.kv_exchange` exchanges through."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ReadableWindow, Window, align_up
from odc_mpi.comm.windows.shared_window import SharedWindow
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: The kinds of flags.
KV_READY, GRAD_READY, GRAD_CONSUMED, KV_RELEASED = range(4)
_FLAG_NAMES = ("keys and values", "gradients of keys and values", "room for gradients", "end")
#: A flag's number is that of the sequence times this, plus the layers that are done.
MAX_LAYERS = 1 << 20
#: Slots of gradients: a rank fills one while the other is read.
_GRADIENT_SLOTS = 2

#: Keys and values, or their gradients, of a piece in a layer: `[1, key_value_heads, tokens, head_dim]` each.
KVPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KVSizes:
    """How much memory a rank's pieces take.

    Attributes:
        num_layers: Layers with attention.
        token_bytes: Of the keys and values of a token in one layer.
        max_chunk_tokens: The most tokens in a piece.
        max_earlier_tokens: The most tokens before a piece.
    """

    num_layers: int
    token_bytes: int
    max_chunk_tokens: int
    max_earlier_tokens: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of a layer."""
        return align_up(self.max_chunk_tokens * self.token_bytes)

    @property
    def gradient_slot_bytes(self) -> int:
        """Bytes of the gradients of a layer, for all earlier pieces."""
        return align_up(self.max_earlier_tokens * self.token_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_layers * self.slot_bytes + _GRADIENT_SLOTS * self.gradient_slot_bytes


class KVWindows:
    """Memory of this rank's pieces that other ranks can read. Making one is collective, as is closing it.

    Args:
        world: The ranks.
        sizes: Of the memory.
        shared: Whether ranks of a node read each other's memory in place.

    Attributes:
        sizes: As given.
        waited_s: Seconds that this rank waited for others so far.

    Raises:
        UserError: /dev/shm has too little room; raised on every rank.
    """

    def __init__(self, world: World, sizes: KVSizes, *, shared: bool) -> None:
        assert 0 < sizes.num_layers < MAX_LAYERS
        self.world, self.sizes = world, sizes
        world.require_shared_memory(sizes.num_bytes, "keys and values of pieces of sequences")
        make = SharedWindow if shared else Window
        self._memory: ReadableWindow = make(world, sizes.num_bytes, torch.uint8)
        self._flags = Window(world, len(_FLAG_NAMES) * world.size, torch.int64)
        self._flag_values = self._flags.tensor.numpy()
        # What the last Put of each flag carried: untouched until that is flushed.
        self._outgoing = np.zeros(len(_FLAG_NAMES) * world.size, dtype=np.int64)
        self._unflushed: set[int] = set()
        # Flags of other ranks that come before a slot is free, by where the slot begins: kind, rank, number.
        self._busy_until: dict[int, list[tuple[int, int, int]]] = {}
        self.waited_s = 0.0
        self._open = True
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "clearing the flags of pieces")

    def close(self) -> None:
        """Free the memory. Collective; a second call does nothing."""
        if self._open:
            self._open = False
            del self._flag_values
            with self.world.collective("freeing the windows of pieces"):
                self._flags.free()
                self._memory.free()
            self.world.cancel_on_close(self.close)

    def slot_offset(self, layer: int) -> int:
        """Return where the keys and values of a layer begin, in bytes."""
        return layer * self.sizes.slot_bytes

    def gradient_slot_offset(self, layer: int) -> int:
        """Return where the gradients of a layer begin, in bytes."""
        turn = layer % _GRADIENT_SLOTS
        return self.slot_offset(self.sizes.num_layers) + turn * self.sizes.gradient_slot_bytes

    def mark_busy_until(self, slot: int, kind: int, ranks: Sequence[int], value: int) -> None:
        """Note that a slot is free when these ranks have raised a flag.

        Args:
            slot: Where the slot begins. Slot 0 stands for the keys and values of all layers.
            kind: Of the flag.
            ranks: That read the slot.
            value: Of the flag.
        """
        self._busy_until[slot] = [(kind, rank, value) for rank in ranks]

    def wait_until_free(self, slot: int, what: str) -> None:
        """Wait until nobody reads a slot that was lent. One-sided."""
        for kind, rank, number in self._busy_until.pop(slot, ()):
            self.wait_for_flag(kind, rank, number, what)

    def write(self, start: int, tensor: torch.Tensor) -> int:
        """Copy a tensor into this rank's memory, `start` in bytes; return where it ends."""
        own = self._memory.tensor[start : start + tensor.nbytes]
        own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return start + tensor.nbytes

    def read(self, rank: int, start: int, pair: KVPair, tokens: int, what: str) -> KVPair:
        """Return a pair of so many tokens in a rank's memory, in place on the host or fetched. One-sided.

        Args:
            rank: Whose memory.
            start: In bytes.
            pair: Has the shapes, but for the tokens, the type and the device.
            tokens: Of the pair to read.
            what: The operation in words that follow "while".
        """
        shapes = [(*part.shape[:2], tokens, part.shape[3]) for part in pair]
        sizes = [part.nbytes // part.shape[2] * tokens for part in pair]
        self._memory.sync()  # no load may come before that of the flag
        whole = self._memory.mapped_shard(rank)
        if whole is not None:
            found = whole[start : start + sum(sizes)]
        else:
            found = torch.empty(sum(sizes), dtype=torch.uint8)
            with self.world.deadline(what, [rank]):
                self._memory.get(rank, found.numpy(), start)
                self._memory.flush()
        parts = zip(found.split(sizes), shapes, pair, strict=True)
        key, value = (part.view(like.dtype).view(shape).to(like.device) for part, shape, like in parts)
        return key, value

    def set_flags(self, kind: int, ranks: Sequence[int], value: int, what: str) -> None:
        """Raise a flag at other ranks; what was written or read before is so when they see it. One-sided."""
        self._memory.sync()
        own = kind * self.world.size + self.world.rank
        for rank in ranks:
            place = kind * self.world.size + rank
            with self.world.deadline(what, [rank]):
                if rank in self._unflushed:  # complete since the last time, as a rule
                    self._flags.flush(rank)
                self._outgoing[place] = value
                self._flags.put(rank, own, self._outgoing[place : place + 1].view(np.uint8))
                self._unflushed.add(rank)
        # Over a network a Put may leave only when somebody calls MPI.
        self.world.comm.Iprobe()

    def flush(self, what: str) -> None:
        """Complete the flags that were raised. One-sided."""
        with self.world.deadline(what, self._unflushed):
            for rank in self._unflushed:
                self._flags.flush(rank)
        self._unflushed.clear()

    def wait_for_flag(self, kind: int, rank: int, value: int, what: str) -> None:
        """Wait for a flag of another rank, serving others meanwhile. One-sided."""

        def is_raised() -> bool:
            self._flags.sync()
            return bool(self._flag_values[kind * self.world.size + rank] >= value)

        if not is_raised():
            began = time.perf_counter()
            with self.world.deadline(f"waiting for the {_FLAG_NAMES[kind]} of {what}", [rank]):
                wait_until(is_raised, self.world.progress.poke)
            self.waited_s += time.perf_counter() - began
