"""Trials of windows on devices: the statements of MPI libraries about device memory are only hints.

Communication: as in `stack.probe`, of which this is a part. The ranks look together whether windows can be made at all;
one pair for each kind of peer tries Get, Put and Accumulate, from device and from host memory; then every rank
accumulates into its own window.

An operation that a library does not support may end the process or never return. So this runs in the processes that
`odc-mpi doctor` starts and nowhere else; the result is cached, and a training run only reads the cache.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.device_window import DeviceWindow, as_mpi_buffer
from odc_mpi.errors import UserError
from odc_mpi.probe import cache, gpu
from odc_mpi.probe.operations import Buffer
from odc_mpi.probe.report import DEVICE_OPERATIONS, Cause, ProbeReport, Problem
from odc_mpi.probe.trial import LARGE_BYTES, TrialBudget, Trials
from odc_mpi.runtime.world import World

#: There are six operations for each kind of peer.
BUDGET = TrialBudget(idle_s=0.05, busy_s=0.2, bandwidth_s=0.3)
#: Seconds that a cached result is valid: devices, drivers and libraries are in its key.
MAX_AGE_S = 30 * 24 * 3600.0
#: Seconds that a lack of answers is cached: the machine may have been busy, or slow to load libraries.
NO_ANSWER_MAX_AGE_S = 24 * 3600.0
#: Elements that each rank adds to its own window.
_SELF_TEST_NUMEL = 100_000


def try_device(
    world: World,
    report: ProbeReport,
    pairs: dict[str, tuple[int, int]],
    device: Device,
    listen: Callable[[ProbeReport, str | None], None],
) -> ProbeReport:
    """Try windows on the ranks' devices; return the report with the findings. Collective.

    Args:
        world: All of its ranks take part, each with a device.
        report: The findings so far.
        pairs: Origin and target for each kind of peer.
        device: The device of this rank.
        listen: As for `probe.probe`; hears "device.memory", "device.window", "ORIGIN.KIND.OPERATION", "device.own".
    """
    device.set_current()
    world.prepare_threads(device.set_current)
    names = tuple(sorted(set(world.gather_objects(device.name))))
    report = report.with_device(names=names, cuda_support=cuda_support(), alloc_kinds=alloc_kinds())
    listen(report, "device.memory")
    troubles = [trouble for trouble in world.gather_objects(allocation_error(device, LARGE_BYTES[-1])) if trouble]
    if troubles:
        return report.with_problem(Problem(("device", "memory"), Cause.OTHER, troubles[0]))
    listen(report, "device.window")
    DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device).free()
    report = report.with_device(window=True)
    if pairs:
        report = _try_pairs(world, report, pairs, device, listen)
    listen(report, "device.own")
    return report.with_device(own_accumulate=all(world.gather_objects(_try_self(world, device))))


def device_cache_key(world: World, device: Device) -> dict[str, Any]:
    """Return the cache key of the result: library, environment, devices, and which ranks share a node. Collective.

    The key holds the path of the loaded UCX, too: the MPI library's version does not show another UCX.

    The key has no host names: the result serves another job on as many nodes of the same kind.
    """
    return {
        **cache.stack_key(MPI.Get_library_version()),
        "ucx": _mapped_libraries("libucp"),
        "driver": gpu.driver(),
        "devices": world.gather_objects([world.node, device.name]),
    }


def load_device_report(world: World, device: Device) -> ProbeReport | None:
    """Return the cached findings of a doctor in the same layout, None without. Collective; tries nothing.

    Args:
        world: All of its ranks take part.
        device: The device of this rank.
    """
    key = device_cache_key(world, device)
    kept = cache.load(key, MAX_AGE_S) if world.rank == 0 else None
    if kept is not None and any(problem.cause is Cause.NO_ANSWER for problem in kept.problems):
        kept = cache.load(key, NO_ANSWER_MAX_AGE_S)
    with world.collective("hearing what a doctor found about device windows"):
        return world.comm.bcast(kept)


def allocation_error(device: Device, num_bytes: int) -> str | None:
    """Return the error of allocating memory for windows on a device, None if it succeeds."""
    try:
        device.empty_for_windows(num_bytes)
    except UserError as error:
        return str(error)
    return None


def cuda_support() -> bool | None:
    """Ask the MPI library whether it was built for CUDA; None where it has no function to ask."""
    for path in _mapped_libraries(r"libmpi\w*"):
        function = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if function is not None:
            return bool(function())
    return None


def alloc_kinds() -> str | None:
    """Return the kinds of memory that the MPI library says it takes; None where it does not say."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or MPI.INFO_ENV.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds


class DeviceBuffer(Buffer):
    """Memory of a device that operations of a trial read or fill.

    Args:
        device: The device.
        values: Initial content, `[n]` uint8.
    """

    def __init__(self, device: Device, values: np.ndarray) -> None:
        self._device = device
        self.tensor = device.empty_for_windows(values.size)
        self.memory = as_mpi_buffer(self.tensor)
        self.tensor.copy_(torch.from_numpy(values))
        device.record_event().synchronize()

    @override
    def fill(self, value: int, num_bytes: int) -> None:
        self.tensor[:num_bytes].fill_(value)
        self._device.record_event().synchronize()

    @override
    def read(self, num_bytes: int) -> np.ndarray:
        return self.tensor[:num_bytes].cpu().numpy().copy()


def _try_pairs(
    world: World,
    report: ProbeReport,
    pairs: dict[str, tuple[int, int]],
    device: Device,
    listen: Callable[[ProbeReport, str | None], None],
) -> ProbeReport:
    under_windows: list[DeviceBuffer] = []  # MPI holds no reference to their memory

    def allocate(world: World, values: np.ndarray) -> Sequence[MPI.Win]:
        under_windows.append(DeviceBuffer(device, values))
        return [MPI.Win.Create(under_windows[-1].memory, 1, MPI.INFO_NULL, world.comm)]

    origins: dict[str, Callable[[np.ndarray], Buffer]]
    origins = {"from_device": lambda values: DeviceBuffer(device, values), "from_host": Buffer}
    trials = Trials(world, pairs, BUDGET, LARGE_BYTES[-1], allocate, origins)
    for name, origin in DEVICE_OPERATIONS:
        for kind in pairs:
            listen(report, f"{origin}.{kind}.{name}")
            result = trials.run(name, kind, origin)
            report = report.with_device_operation(origin, kind, name, result.operation)
            if result.problem:
                report = report.with_problem(Problem((origin, kind, name), result.problem))
    trials.close()
    return report


def _try_self(world: World, device: Device) -> bool:
    """Accumulate into this rank's own window, twice; return whether the sum is right. Collective."""
    window = DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device)
    values = device.empty_for_windows(_SELF_TEST_NUMEL * 4).view(torch.float32)
    values.copy_(torch.arange(_SELF_TEST_NUMEL, dtype=torch.float32))
    device.record_event().synchronize()
    world.wait_collective(world.comm.Ibarrier(), "clearing the windows of a probe")
    for _ in range(2):
        window.accumulate(world.rank, 0, as_mpi_buffer(values))
    window.flush()
    window.sync()
    is_right = bool((window.tensor == 2 * values).all())
    window.free()
    return is_right


def _mapped_libraries(name: str) -> list[str]:
    """Return the files of libraries that this process has loaded, by a pattern of their names before the suffix."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(rf"/\S*/{name}\.so[\d.]*$", maps, re.MULTILINE)))
