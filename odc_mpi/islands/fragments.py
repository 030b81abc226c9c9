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


class Fragment:
    """A rank's part of a fragment.

    Attributes:
        parts: For each of the rank's slices that overlap the fragment, the index of the slice, the overlapping
            range of elements within the slice, and the range of these elements in the fragment's flat buffer.
        num_elements: Number of elements in the flat buffer, a multiple of 32.
    """

    def __init__(self, parts: Sequence[tuple[int, slice, slice]]) -> None:
        self.parts = parts
        self.num_elements = _align(parts[-1][2].stop) if parts else 0

    def read(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a flat buffer, fp32 `[num_elements]`, with copies of the parts."""
        device = slices[0].device if slices else None
        flat = torch.zeros(self.num_elements, dtype=torch.float32, device=device)
        self._copy(self._views(flat), self._select(slices))
        return flat

    def write(self, flat: torch.Tensor, slices: Sequence[torch.Tensor]) -> None:
        """Copy the parts of this fragment from a flat buffer to the slices."""
        self._copy(self._select(slices), self._views(flat))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[where] for _, _, where in self.parts]

    def _select(self, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [slices[index][elements] for index, elements, _ in self.parts]

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets:
            torch._foreach_copy_(targets, sources)


def make_fragments(slices: Sequence[tuple[int, int, int]], num_fragments: int) -> list[Fragment]:
    """Cut the parameters into fragments of nearly equal size, and return this rank's part of each.

    `slices` contains `(numel, start, stop)` for each trainable parameter, in the same order on all ranks:
    this rank owns elements `[start, stop)` of the flattened parameter's `numel` elements. A slice may be empty.
    """
    bases = list(itertools.accumulate((_align(numel) for numel, _, _ in slices), initial=0))
    num_blocks = bases[-1] // BLOCK_NUMEL
    bounds = [num_blocks * i // num_fragments * BLOCK_NUMEL for i in range(num_fragments + 1)]
    fragments = []
    for first, last in itertools.pairwise(bounds):
        parts, offset = [], 0
        for index, ((_, start, stop), base) in enumerate(zip(slices, bases, strict=False)):
            begin, end = max(start, first - base), min(stop, last - base)
            if begin < end:
                where = slice(offset, offset + end - begin)
                parts.append((index, slice(begin - start, end - start), where))
                offset = _align(where.stop)
        fragments.append(Fragment(parts))
    return fragments


def _align(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL) * BLOCK_NUMEL


@dataclass(frozen=True)
class Schedule:
    """Schedule of the steps, counted from 1, after which fragments are sent and applied.

    The next fragment is applied every `sync_every / num_fragments` steps, so each fragment is applied once every
    `sync_every` steps. A fragment is sent `delay` steps earlier, when none is in flight, because `delay` is less than
    `sync_every / num_fragments`. torchft calls this delay `fragment_sync_delay`.
    """

    sync_every: int
    num_fragments: int = 1
    delay: int = 0

    def sends_after(self, step: int) -> bool:
        """Return True if a fragment is sent after step `step`."""
        return self.applies_after(step + self.delay)

    def applies_after(self, step: int) -> bool:
        """Return True if a fragment is applied after step `step`."""
        return step > 0 and step % (self.sync_every // self.num_fragments) == 0
