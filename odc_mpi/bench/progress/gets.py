"""What a Get takes from a rank that computes in several ways and is served by its progress thread.

The window is an ordinary one, and everything that is read is compared with what was written.
"""

from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from odc_mpi.bench.measure import interleaved
from odc_mpi.bench.progress.computing import Sample, Spells, Work, kinds_of_work
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.windows.rma import Window
from odc_mpi.runtime.world import World

#: A prime, so that no page of the window is like the one before.
_PERIOD = 251


def read(world: World, window: Window, target: int, memory: np.ndarray) -> float:
    """Read the first bytes of a target's part of a window; return the seconds. One-sided.

    Args:
        world: The ranks.
        window: Of bytes, which hold the `pattern` of each rank.
        target: Whose part is read.
        memory: As many bytes as are read, uint8.

    Raises:
        RuntimeError: Something else came.
    """
    memory[:] = _PERIOD  # which is nowhere in the pattern
    began = perf_counter()
    with world.deadline(f"reading {len(memory)} bytes of a rank that computes", [target]):
        window.get(target, memory)
        window.flush(target)
    seconds = perf_counter() - began
    if not np.array_equal(memory, pattern(len(memory), target)):
        raise RuntimeError(f"a Get of {len(memory)} bytes from rank {target} brought something else")
    return seconds


def measure(world: World, target: int, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Read from a target that computes, each kind of work in turn. Collective.

    Args:
        world: The ranks.
        target: Who computes.
        sizes: In bytes.
        repeats: Samples of each kind and size.

    Returns:
        `get` of `bench.progress.benchmark`, the same on every rank.
    """
    window = Window(world, max(sizes), torch.uint8)
    window.tensor.numpy()[:] = pattern(max(sizes), world.rank)
    window.sync()
    buffer = np.empty(max(sizes) if world.rank == 0 else 0, dtype=np.uint8)
    spells = Spells(world, target)
    progress = ProgressThread(world, serve=lambda: False)
    kinds: dict[str, Work] = {"idle": None, **kinds_of_work()}
    result = []
    for num_bytes in sizes:
        read_once = partial(read, world, window, target, buffer[:num_bytes])
        spells.sample(None, read_once)  # pays for connections and fresh pages
        samples = interleaved({name: partial(spells.sample, work, read_once) for name, work in kinds.items()}, repeats)
        result.append({"size_bytes": num_bytes, "kinds": {name: _entry(taken) for name, taken in samples.items()}})
    progress.close()
    spells.free()
    with world.meeting("freeing a window"):
        window.free()
    return result


def _entry(samples: list[Sample]) -> dict[str, float]:
    seconds = [sample.seconds for sample in samples]
    computed_s = median(sample.computed_s for sample in samples)
    return {"median_s": median(seconds), "longest_s": max(seconds), "computed_s": computed_s}


def pattern(num_bytes: int, rank: int) -> np.ndarray:
    """Return the bytes that a rank writes into its part of the window, `[num_bytes]` uint8. Local."""
    period = np.roll(np.arange(_PERIOD, dtype=np.uint8), -rank)
    return np.resize(period, num_bytes)
