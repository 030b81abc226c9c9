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

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import numpy as np
import torch

from odc_mpi.comm.windows.rma import SharedWindow, Window
from odc_mpi.runtime.deadline import complete
from odc_mpi.runtime.world import World

#: The kinds of flags.
_SHOWN, _GIVEN, _TAKEN, _READ = range(4)
_NAMES = ("keys and values", "gradients of keys and values", "room for gradients", "end")
#: A flag's number is that of the sequence times this, plus the layers that are done.
_MOST_LAYERS = 1 << 20
#: Slots begin at multiples of so many bytes.
_ALIGNMENT = 64
#: Slots of gradients: a rank fills one while the other is read.
_GRADIENT_SLOTS = 2

#: Keys and values, or their gradients, of a piece in a layer: `[1, key_value_heads, tokens, head_dim]` each.
_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much memory a rank's pieces take.

    Attributes:
        num_layers: Layers with attention.
        token_bytes: Of the keys and values of a token in one layer.
        max_piece_tokens: The most tokens in a piece.
        max_earlier_tokens: The most tokens before a piece.
    """

    num_layers: int
    token_bytes: int
    max_piece_tokens: int
    max_earlier_tokens: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of a layer."""
        return _aligned(self.max_piece_tokens * self.token_bytes)

    @property
    def gradient_slot_bytes(self) -> int:
        """Bytes of the gradients of a layer, for all earlier pieces."""
        return _aligned(self.max_earlier_tokens * self.token_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_layers * self.slot_bytes + _GRADIENT_SLOTS * self.gradient_slot_bytes


class PieceWindows:
    """Memory of this rank's pieces that other ranks can read. Making one is collective, as is closing it.

    Args:
        world: The ranks.
        sizes: Of the memory.
        in_place: Whether ranks of a node read each other's memory in place.
        serve: The owner's part of the gradient store, called while this rank waits.

    Attributes:
        sizes: As given.
        waited_s: Seconds that this rank waited for others so far.

    Raises:
        UserError: /dev/shm has too little room; raised on every rank.
    """

    def __init__(
        self,
        world: World,
        sizes: Sizes,
        *,
        in_place: bool,
        serve: Callable[[], object] = lambda: None,
    ) -> None:
        assert 0 < sizes.num_layers < _MOST_LAYERS
        self.world, self.sizes = world, sizes
        self._serve = serve
        world.require_shared_memory(sizes.num_bytes, "keys and values of pieces of sequences")
        make = SharedWindow if in_place else Window
        self._memory: SharedWindow | Window = make(world, sizes.num_bytes, torch.uint8)
        self._flags = Window(world, len(_NAMES) * world.size, torch.int64)
        self._arrived = self._flags.tensor.numpy()
        # What the last Put of each flag carried: untouched until that is flushed.
        self._sent = np.zeros(len(_NAMES) * world.size, dtype=np.int64)
        self._unflushed: set[int] = set()
        # Flags of other ranks, by kind and number, that come before a slot is free.
        self._readers: list[tuple[int, int]] = []
        self._takers: list[list[tuple[int, int]]] = [[] for _ in range(_GRADIENT_SLOTS)]
        self.waited_s = 0.0
        self._open = True
        world.on_close(self.close)
        world.meet(world.comm.Ibarrier(), "clearing the flags of pieces")

    def close(self) -> None:
        """Free the memory. Collective; a second call does nothing."""
        if self._open:
            self._open = False
            del self._arrived
            with self.world.meeting("freeing the windows of pieces"):
                self._flags.free()
                self._memory.free()
            self.world.forget(self.close)

    def slot(self, layer: int) -> int:
        """Return where the keys and values of a layer begin, in bytes. Local."""
        return layer * self.sizes.slot_bytes

    def gradient_slot(self, layer: int) -> int:
        """Return where the gradients of a layer begin, in bytes. Local."""
        turn = layer % _GRADIENT_SLOTS
        return self.slot(self.sizes.num_layers) + turn * self.sizes.gradient_slot_bytes

    def await_readers(self, what: str) -> None:
        """Wait until nobody reads the keys and values of this rank's last piece. One-sided."""
        readers, self._readers = self._readers, []
        for rank, number in readers:
            self.wait(_READ, rank, number, what)

    def await_takers(self, layer: int, what: str) -> None:
        """Wait until nobody reads the gradients in the slot of a layer. One-sided."""
        turn = layer % _GRADIENT_SLOTS
        takers, self._takers[turn] = self._takers[turn], []
        for rank, number in takers:
            self.wait(_TAKEN, rank, number, what)

    def expect_readers(self, readers: Sequence[tuple[int, int]]) -> None:
        """Tell by which flags READ the keys and values will be free. Local."""
        self._readers = list(readers)

    def expect_takers(self, layer: int, takers: Sequence[tuple[int, int]]) -> None:
        """Tell by which flags TAKEN the slot of a layer will be free. Local."""
        self._takers[layer % _GRADIENT_SLOTS] = list(takers)

    def write(self, start: int, tensor: torch.Tensor) -> int:
        """Copy a tensor into this rank's memory, `start` in bytes; return where it ends. Local."""
        own = self._memory.tensor[start : start + tensor.nbytes]
        own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return start + tensor.nbytes

    def read(self, rank: int, start: int, pair: _Pair, tokens: int, what: str) -> _Pair:
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
        whole = self._memory.near(rank)
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

    def tell(self, kind: int, ranks: Sequence[int], number: int, what: str) -> None:
        """Raise a flag at other ranks; what was written or read before is so when they see it. One-sided."""
        self._memory.sync()
        own = kind * self.world.size + self.world.rank
        for rank in ranks:
            place = kind * self.world.size + rank
            with self.world.deadline(what, [rank]):
                if rank in self._unflushed:  # complete since the last time, as a rule
                    self._flags.flush(rank)
                self._sent[place] = number
                self._flags.put(rank, own, self._sent[place : place + 1].view(np.uint8))
                self._unflushed.add(rank)
        # Over a network a Put may leave only when somebody calls MPI.
        self.world.comm.Iprobe()

    def flush(self, what: str) -> None:
        """Complete the flags that were raised. One-sided."""
        with self.world.deadline(what, self._unflushed):
            for rank in self._unflushed:
                self._flags.flush(rank)
        self._unflushed.clear()

    def wait(self, kind: int, rank: int, number: int, what: str) -> None:
        """Wait for a flag of another rank, serving others meanwhile. One-sided."""
        flag = _Flag(self, kind * self.world.size + rank, number)
        if not flag.Test():
            began = time.perf_counter()
            with self.world.deadline(f"waiting for the {_NAMES[kind]} of {what}", [rank]):
                complete(flag, self._meanwhile)
            self.waited_s += time.perf_counter() - began

    def arrived(self, place: int) -> int:
        """Return a flag in this rank's memory. Local."""
        self._flags.sync()
        return int(self._arrived[place])

    def _meanwhile(self) -> None:
        self.world.comm.Iprobe()  # over a network nothing arrives unless somebody calls MPI
        self._serve()


class PieceExchange:
    """One piece's side of the exchange: a context in which its forward and backward run.

    Args:
        windows: Of this rank.
        turn: Number of the sequence among all that were cut so far, from 1: the same on all ranks.
        bounds: Where the sequence's pieces begin and end, in tokens, `[pieces + 1]`.
        ranks: The rank of each piece.
        sequence: The sequence in words, for messages.
    """

    def __init__(
        self, windows: PieceWindows, turn: int, bounds: Sequence[int], ranks: Sequence[int], sequence: str
    ) -> None:
        self._windows = windows
        self._base = turn * _MOST_LAYERS
        self._bounds, self._ranks, self._sequence = tuple(bounds), tuple(ranks), sequence
        self._own = self._ranks.index(windows.world.rank)
        self._num_shown = 0
        # Shapes, type and device of keys and values in each layer.
        self._like: list[_Pair] = []

    def __enter__(self) -> "PieceExchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After an exception the others wait in vain, and the job ends.
        if error is None:
            self.finish()

    def show(self, layer: int, own: _Pair) -> None:
        """Let later pieces read keys and values; a second call for a layer, in a recomputation, does nothing.

        One-sided. At the first layer it waits until nobody reads this rank's last piece any more.
        """
        if layer < self._num_shown:
            return
        assert layer == self._num_shown < self._windows.sizes.num_layers, (
            f"layer {layer} comes after {self._num_shown - 1}"
        )
        self._num_shown += 1
        key, value = own
        self._like.append((torch.empty_like(key[:, :, :1]), torch.empty_like(value[:, :, :1])))
        if layer == 0:
            self._windows.await_readers("its last piece")
        if self._later:
            end = self._windows.write(self._windows.slot(layer), key)
            end = self._windows.write(end, value)
            assert end <= self._windows.slot(layer + 1), f"{key.shape} and {value.shape} do not fit into a slot"
            self._tell(_SHOWN, self._later, layer + 1, layer)

    def earlier(self, layer: int) -> Iterator[_Pair]:
        """Yield keys and values of each earlier piece, in order, as soon as they are shown. One-sided, waits."""
        for piece in range(self._own):
            what = self._say(piece, layer)
            self._windows.wait(_SHOWN, self._ranks[piece], self._base + layer + 1, what)
            yield self._read(piece, self._windows.slot(layer), layer, piece)

    def give(self, layer: int, gradients: Sequence[_Pair]) -> None:
        """Hand each earlier piece, in order, what this one adds to its gradients. One-sided, waits for room."""
        assert len(gradients) == self._own
        if not gradients:
            return
        self._windows.await_takers(layer, f"a slot for {self._say(self._own, layer)}")
        for piece, (key, value) in enumerate(gradients):
            self._windows.write(self._windows.write(self._gradients(piece, layer), key), value)
        number = self._from_top(layer)
        self._windows.expect_takers(layer, [(rank, self._base + number) for rank in self._earlier])
        self._tell(_GIVEN, self._earlier, number, layer)

    def taken(self, layer: int, own: _Pair) -> _Pair:
        """Return gradients with what all later pieces have given added, in their order. One-sided, waits."""
        wide = torch.promote_types(own[0].dtype, torch.float32)
        total_key, total_value = (part.to(wide, copy=True) for part in own)
        number = self._from_top(layer)
        for piece, rank in enumerate(self._later, self._own + 1):
            self._windows.wait(_GIVEN, rank, self._base + number, self._say(piece, layer))
            key, value = self._read(piece, self._gradients(self._own, layer), layer, self._own)
            total_key += key
            total_value += value
            self._tell(_TAKEN, [rank], number, layer)
        return total_key.to(own[0].dtype), total_value.to(own[1].dtype)

    def finish(self) -> None:
        """Tell earlier pieces that their keys and values are not read any more. One-sided."""
        self._tell(_READ, self._earlier, 0, self._windows.sizes.num_layers - 1)
        if self._later:
            self._windows.expect_readers([(rank, self._base) for rank in self._later])
        self._windows.flush(f"ending {self._say(self._own, 0)}")

    @property
    def _earlier(self) -> tuple[int, ...]:
        return self._ranks[: self._own]

    @property
    def _later(self) -> tuple[int, ...]:
        return self._ranks[self._own + 1 :]

    def _from_top(self, layer: int) -> int:
        return self._windows.sizes.num_layers - layer

    def _gradients(self, piece: int, layer: int) -> int:
        """Return where gradients of an earlier piece begin in the memory of a later one."""
        token_bytes = sum(part.nbytes // part.shape[2] for part in self._like[layer])
        return self._windows.gradient_slot(layer) + self._bounds[piece] * token_bytes

    def _read(self, piece: int, start: int, layer: int, of: int) -> _Pair:
        """Read, in the memory of a piece, keys and values, or gradients, that are those `of` another."""
        tokens = self._bounds[of + 1] - self._bounds[of]
        what = f"reading from {self._say(piece, layer)}"
        return self._windows.read(self._ranks[piece], start, self._like[layer], tokens, what)

    def _tell(self, kind: int, ranks: Sequence[int], number: int, layer: int) -> None:
        self._windows.tell(kind, ranks, self._base + number, f"telling others of {self._say(self._own, layer)}")

    def _say(self, piece: int, layer: int) -> str:
        return f"piece {piece + 1} of {len(self._ranks)} of {self._sequence}, layer {layer}"


class _Flag:
    """A flag that is waited for, as `runtime.deadline.complete` takes it."""

    def __init__(self, windows: PieceWindows, place: int, number: int) -> None:
        self._windows, self._place, self._number = windows, place, number

    def Test(self) -> bool:  # noqa: N802 - MPI's own name
        """Return whether the flag is raised. Local."""
        return self._windows.arrived(self._place) >= self._number


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
