"""Fragments: parts of the parameters that islands synchronize at different steps, and the schedule of these steps.

The trainable parameters are concatenated and cut into fragments of similar size. Each rank handles its own slices:

    parameters   [ embedding            | q_proj  | k_proj  | ... ]
    fragments    [      fragment 0          |       fragment 1      ]

The flat buffer of a fragment holds a rank's parts of it, each padded to a multiple of 32 elements with zeros. Fragments
and slices begin at multiples of 32 elements of a parameter. A block of 32 elements therefore holds the same elements,
whatever the number of ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc_mpi.islands.encoding import BLOCK_NUMEL


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `[start, stop)` of the flattened parameter `name`, which has `numel` elements. May be empty."""

    name: str
    numel: int
    start: int
    stop: int


@dataclass(frozen=True)
class FragmentPart:
    """Elements `[start, stop)` of a rank's slice number `index`, at `offset` in the flat buffer of a fragment."""

    index: int
    start: int
    stop: int
    offset: int


class Fragment:
    """A rank's part of a fragment. `num_elements` is the size of its flat buffer, a multiple of 32."""

    def __init__(self, parts: Sequence[FragmentPart]) -> None:
        self.parts = parts
        self.num_elements = sum(_align(part.stop - part.start) for part in parts)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of each part in a flat buffer, `[num_elements]`."""
        return [flat[part.offset : part.offset + part.stop - part.start] for part in self.parts]

    def select(self, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the view of each part in the rank's slices of all trainable parameters."""
        return [slices[part.index][part.start : part.stop] for part in self.parts]

    def read(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a flat buffer with copies of the parts, `[num_elements]` fp32."""
        device = slices[0].device if slices else None
        flat = torch.zeros(self.num_elements, dtype=torch.float32, device=device)
        self._copy(self.views(flat), self.select(slices))
        return flat

    def write(self, flat: torch.Tensor, slices: Sequence[torch.Tensor]) -> None:
        """Copy the parts from a flat buffer to the slices."""
        self._copy(self.select(slices), self.views(flat))

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets:
            torch._foreach_copy_(targets, sources)


def make_fragments(slices: Sequence[ParameterSlice], num_fragments: int) -> list[Fragment]:
    """Cut the parameters into fragments of nearly equal size, and return this rank's part of each.

    `slices` are this rank's slices of all trainable parameters, in the same order on all ranks.
    """
    bases, total = [], 0
    for each in slices:
        bases.append(total)
        total += _align(each.numel)
    num_blocks = total // BLOCK_NUMEL
    bounds = [num_blocks * i // num_fragments * BLOCK_NUMEL for i in range(num_fragments + 1)]
    return [Fragment(_parts(slices, bases, *pair)) for pair in itertools.pairwise(bounds)]


def _parts(slices: Sequence[ParameterSlice], bases: Sequence[int], first: int, last: int) -> list[FragmentPart]:
    parts, offset = [], 0
    for index, (each, base) in enumerate(zip(slices, bases, strict=True)):
        start, stop = max(each.start, first - base), min(each.stop, last - base)
        if start < stop:
            parts.append(FragmentPart(index, start - each.start, stop - each.start, offset))
            offset += _align(stop - start)
    return parts


def _align(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL) * BLOCK_NUMEL


@dataclass(frozen=True)
class Schedule:
    """Steps at which fragments are sent and applied, counted from 1.

    Every `sync_every / num_fragments` steps, the next fragment is applied, so each is applied once in `sync_every`
    steps. It was sent `delay` steps earlier. `delay` is `fragment_sync_delay` in torchft.
    """

    sync_every: int
    num_fragments: int = 1
    delay: int = 0

    @property
    def period(self) -> int:
        """Number of steps between the synchronizations of two fragments."""
        return self.sync_every // self.num_fragments

    def to_send(self, step: int) -> int | None:
        """Return the index of the fragment to send after step `step`, or None."""
        return self.to_apply(step + self.delay)

    def to_apply(self, step: int) -> int | None:
        """Return the index of the fragment to apply after step `step`, or None."""
        number, rest = divmod(step, self.period)
        return None if rest or step == 0 else (number - 1) % self.num_fragments
