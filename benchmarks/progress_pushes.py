"""Time of a push to an owner that computes: a plain Put and the reductions, alternating.

The target owns all bytes of a push. The push is timed until it is complete there: data of a Put or Accumulate is in the
target's window, data of the mailbox has been received. The target computes, and its progress thread receives. All
values are small whole numbers, so that every sum can be checked exactly.

An MPI operation cannot be interrupted. So a variant has a time budget for each size: when it is used up, no more
samples and no larger sizes are measured; nor are sizes for which a single push would exceed it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from progress_computing import Spells, Work, kinds_of_work

from odc_mpi.bench.measure import entries, rotate
from odc_mpi.bench.transport import unit_layout
from odc_mpi.comm.layout import ALIGNMENT_NUMEL, FlatLayout
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.windows.rma import Window, messages
from odc_mpi.formatting import format_size
from odc_mpi.runtime.world import World

#: Work of the target.
WORK = "small_operations"
#: The variant that the others are compared with.
PUT = "put"
#: Values are below this, so that the sums of 60,000 pushes are exact in fp32; a prime, so that no two pages are equal.
_PERIOD = 251


class Pushes:
    """Windows, reductions and a progress thread, for all sizes. Construction is collective.

    Args:
        target: Owner of the gradients.
        sizes: Sizes of pushes in bytes, multiples of 4.

    Attributes:
        ways: By name, a function that pushes the size of an index, completes it and returns the seconds. One-sided.
    """

    def __init__(self, world: World, target: int, sizes: Sequence[int]) -> None:
        self._world, self._target, self._sizes = world, target, sizes
        self._layouts = [_layout(num_bytes // 4, world.size) for num_bytes in sizes]
        self._window = Window(world, max(sizes) // 4, torch.float32)
        stores = {"accumulate": AccumulateGradientStore, "mailbox": MailboxGradientStore}
        self._reductions = {name: make(world, torch.float32) for name, make in stores.items()}
        for reduction in self._reductions.values():
            reduction.plan(self._layouts)
            reduction.allocate()
        # Only the mailbox leaves work to the owner.
        self._progress = ProgressThread(world, world.progress.run_tasks)
        self._gradient = torch.from_numpy(pattern(max(sizes) // 4 if world.rank == 0 else 0))
        self.ways: dict[str, Callable[[int], float]] = {PUT: self._put}
        self.ways |= {name: partial(self._push, name) for name in stores}

    def clear(self) -> None:
        """Clear the window of Puts before a size is measured. Collective."""
        self._window.tensor.zero_()
        self._window.sync()
        self._meet("clearing a window")

    def check(self, index: int, num_pushes: Mapping[str, int]) -> None:
        """Compare the target's sums with the pushed values. Collective.

        Args:
            index: Index of the size.
            num_pushes: Number of pushes by variant; 0 if it was omitted.

        Raises:
            RuntimeError: A push was lost or doubled, or written to a wrong position.
        """
        self._meet("completing the pushes")
        for reduction in self._reductions.values():
            reduction.complete()
        self._window.sync()
        numel = self._sizes[index] // 4
        arrived = {name: reduction.shard(index) for name, reduction in self._reductions.items()}
        # A Put overwrites.
        arrived[PUT] = self._window.tensor
        times = {**num_pushes, PUT: min(1, num_pushes[PUT])}
        if self._world.rank == self._target:
            for name, values in arrived.items():
                if not np.array_equal(values.numpy()[:numel], times[name] * pattern(numel)):
                    raise RuntimeError(f"{name}: {num_pushes[name]} pushes of {4 * numel} bytes have a wrong sum")
        self._meet("checking the sums")

    def free(self) -> None:
        """Free all memory. Collective."""
        with self._world.collective("freeing the windows"):
            self._progress.close()
            for reduction in reversed(self._reductions.values()):
                reduction.free()
            self._window.free()

    def _put(self, index: int) -> float:
        values, numel = self._gradient.numpy(), self._sizes[index] // 4
        began = perf_counter()
        with self._world.deadline("putting into the window of a rank that computes", [self._target]):
            self._window.put_messages(values, messages(self._target, 0, numel))
            self._window.flush(self._target)
        return perf_counter() - began

    def _push(self, name: str, index: int) -> float:
        reduction, gradient = self._reductions[name], self._gradient[: self._sizes[index] // 4]
        start, _ = self._layouts[index].owned(self._target)
        began = perf_counter()
        reduction.push(index, gradient, start).wait()
        reduction.flush()
        return perf_counter() - began

    def _meet(self, what: str) -> None:
        self._world.wait_collective(self._world.comm.Ibarrier(), what)


def measure_pushes(
    world: World, target: int, sizes: Sequence[int], repeats: int, budget_s: float
) -> list[dict[str, Any]]:
    """Push to a target that computes, alternating the variants, the smallest size first. Collective.

    Args:
        target: Rank that computes.
        sizes: Sizes of pushes in bytes, multiples of 4.
        repeats: Samples of each variant and size.
        budget_s: Seconds for each variant and size.

    Returns:
        `reduction` of the object of `progress.py`, the same on every rank.

    Raises:
        RuntimeError: A sum is wrong.
    """
    sizes = sorted(sizes)
    pushes = Pushes(world, target, sizes)
    spells = Spells(world, target)
    work = kinds_of_work()[WORK]
    left_out: dict[str, str] = {}
    results: list[dict[str, Any]] = []
    for index, num_bytes in enumerate(sizes):
        pushes.clear()
        samples = {
            name: partial(_sample, spells, work, partial(way, index))
            for name, way in pushes.ways.items()
            if name not in left_out
        }
        taken = within(budget_s, samples, repeats + 1)  # the first includes connections and fresh pages
        pushes.check(index, {name: len(taken.get(name, ())) for name in pushes.ways})
        results.append(entry(num_bytes, taken, left_out))
        for name, times in taken.items():
            reason = index + 1 < len(sizes) and too_slow(times, num_bytes, sizes[index + 1], budget_s)
            left_out |= {name: reason} if reason else {}
    spells.free()
    pushes.free()
    return results


def _sample(spells: Spells, work: Work, push: Callable[[], float]) -> float:
    return spells.sample(work, push).seconds


def within(budget_s: float, samples: Mapping[str, Callable[[], float]], most: int) -> dict[str, list[float]]:
    """Take samples alternately, at least one of each variant, until a variant has used its budget.

    Collective if the samples are.

    Args:
        budget_s: Seconds for each variant.
        samples: By name, a function that takes a sample and returns its seconds.
        most: Maximum number of samples of each variant.

    Returns:
        Seconds of the samples by name.
    """
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for turn in range(most if samples else 0):
        for name in rotate(list(samples), turn):
            if sum(taken[name]) <= budget_s:
                taken[name].append(samples[name]())
    return taken


def too_slow(times: Sequence[float], num_bytes: int, next_bytes: int, budget_s: float) -> str | None:
    """Return the reason for omitting a larger size, or None."""
    own, larger, allowed = format_size(num_bytes), format_size(next_bytes), f"a size has {budget_s:g} s"
    if sum(times) > budget_s:
        return f"{len(times)} of {own} took {sum(times):.3g} s, {allowed}"
    expected_s = min(times) * next_bytes / num_bytes
    return f"one of {larger} would take {expected_s:.3g} s, {allowed}" if expected_s > budget_s else None


def entry(num_bytes: int, taken: Mapping[str, Sequence[float]], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of a size in `reduction`.

    Args:
        num_bytes: Size of a push.
        taken: Seconds of each variant; the first sample is dropped if there are more.
        left_out: Reasons for the omitted variants.
    """
    kept = {name: list(times[1:] or times) for name, times in taken.items()}
    found = entries(kept, num_bytes, of_put=lambda _: PUT)
    return {
        "size_bytes": num_bytes,
        "variants": {name: {"num_samples": len(kept[name]), **figures} for name, figures in found.items()},
        "left_out": dict(left_out),
    }


def pattern(numel: int) -> np.ndarray:
    """Return the values of a push, `[numel]` float32."""
    return np.resize(np.arange(1, _PERIOD + 1, dtype=np.float32), numel)


def _layout(numel: int, num_owners: int) -> FlatLayout:
    """Return a layout in which each rank owns at least `numel` elements."""
    own = -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
    return unit_layout(own * num_owners, num_owners)
