"""Every rank of a transport in a thread of this process, on small units."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from local_transport import LocalGroup

from odc_mpi.comm.transport import Transport
from odc_mpi.shard.layout import FlatLayout, ParameterSpec


def make_layouts(size: int) -> list[FlatLayout]:
    shapes = [[(3, 5), (70,)], [(1,)], [(0,)], [(400,)]]
    return [
        FlatLayout.build(f"u{i}", [ParameterSpec(f"{i}.{k}", shape, True) for k, shape in enumerate(unit)], size)
        for i, unit in enumerate(shapes)
    ]


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
