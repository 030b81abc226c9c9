"""Every rank of a transport in a thread of this process, on small units."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from local_transport import LocalGroup

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.transport import Transport


def make_layouts(size: int) -> list[FlatLayout]:
    shapes = [[(3, 5), (70,)], [(1,)], [(0,)], [(400,)]]
    return [
        FlatLayout.build(f"u{i}", [ParameterSpec(f"{i}.{k}", shape, True) for k, shape in enumerate(unit)], size)
        for i, unit in enumerate(shapes)
    ]


def draw_pushes(size: int, arrays: Sequence[int]) -> list[list[tuple[int, int, torch.Tensor]]]:
    """For each rank an array, a start and integers, some times, some of them empty."""
    pushes: list[list[tuple[int, int, torch.Tensor]]] = []
    for rank in range(size):
        rng = random.Random(rank)
        pushes.append([])
        for _ in range(30):
            index = rng.choice(arrays)
            numel = make_layouts(size)[index].numel
            start = rng.randint(0, numel)
            pushes[rank].append((index, start, torch.randint(-9, 9, (rng.randint(0, numel - start),)).float()))
    return pushes


def assert_sums(pushes: list[list[tuple[int, int, torch.Tensor]]], shards: list[list[torch.Tensor]]) -> None:
    """Check that the shards of each rank are the sums of the pushes of all ranks."""
    for i, layout in enumerate(make_layouts(len(pushes))):
        expected = torch.zeros(len(pushes) * layout.shard_numel)
        for own in pushes:
            for index, start, gradient in own:
                if index == i:
                    expected[start : start + gradient.numel()] += gradient
        assert torch.equal(torch.cat([of_rank[i] for of_rank in shards]), expected)


def run(size: int, make: Callable[[LocalGroup, int], Transport], work: Callable[[Any], Any]) -> list[Any]:
    """Make a transport on every rank, have it work, and return the results; a rank that fails frees the others."""
    group = LocalGroup(size, timeout_s=10.0)

    def rank(r: int) -> Any:
        try:
            transport = make(group, r)
            transport.allocate(make_layouts(size))
            return work(transport)
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, r) for r in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
