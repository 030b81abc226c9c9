"""The part of a probe that tries windows on devices. What MPI libraries report about device memory is only a hint.

All ranks create a window. One pair for each kind of peer tries Get, Put and Accumulate, from device and from host
memory. Then every rank accumulates to its own window.

An unsupported operation may end the process or never return. So these trials only run in child processes of
`odc-mpi doctor`. Their results are cached, and a training run only reads the cache.
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
from odc_mpi.probe.report import DEVICE_OPERATIONS, Cause, OnMessage, ProbeReport, Problem
from odc_mpi.probe.trial import LARGE_BYTES, TrialBudget, Trials
from odc_mpi.runtime.world import World

#: Less than `probe.FULL`, since there are six operations for each kind of peer.
BUDGET = TrialBudget(idle_s=0.05, busy_s=0.2, bandwidth_s=0.3)
#: Seconds that a cached result is valid. Its key covers devices, drivers and libraries.
MAX_AGE_S = 30 * 24 * 3600.0
#: Seconds that a missing result is cached: the machine may have been busy, or slow to load libraries.
NO_ANSWER_MAX_AGE_S = 24 * 3600.0
#: Elements that each rank adds to its own window.
_SELF_TEST_NUMEL = 100_000


def try_device(
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], device: Device, on_message: OnMessage
) -> ProbeReport:
    """Try windows on the ranks' devices; add the results to the report. Collective.

    Args as in `probe`. The trials are "device.memory", "device.window", "ORIGIN.KIND.OPERATION" and "device.own".
    """
    device.set_current()
    world.prepare_threads(device.set_current)
    names = tuple(sorted(set(world.gather_objects(device.name))))
    report = report.with_device(names=names, cuda_support=cuda_support(), alloc_kinds=alloc_kinds())
    on_message(report, "device.memory")
    errors = [error for error in world.gather_objects(allocation_error(device, LARGE_BYTES[-1])) if error]
    if errors:
        return report.with_problem(Problem(("device", "memory"), Cause.OTHER, errors[0]))
    on_message(report, "device.window")
    DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device).free()
    report = report.with_device(window=True)
    if pairs:
        report = _try_pairs(world, report, pairs, device, on_message)
    on_message(report, "device.own")
    return report.with_device(own_accumulate=all(world.gather_objects(_try_self(world, device))))


def device_cache_key(world: World, device: Device) -> dict[str, Any]:
    """Return the cache key of the result: library, environment, devices, and the node of each rank. Collective.

    The key includes the path of the loaded UCX, since the MPI library's version does not. It has no host names, so that
    the result is valid for jobs on other nodes of the same kind.
    """
    return {
        **cache.stack_key(MPI.Get_library_version()),
        "ucx": _mapped_libraries("libucp"),
        "driver": gpu.driver(),
        "devices": world.gather_objects([world.node, device.name]),
    }


def load_device_report(world: World, device: Device) -> ProbeReport | None:
    """Return the cached report of `odc-mpi doctor` in the same layout, if there is one. Collective."""
    key = device_cache_key(world, device)
    cached = cache.load(key, MAX_AGE_S) if world.rank == 0 else None
    if cached is not None and any(problem.cause is Cause.NO_ANSWER for problem in cached.problems):
        cached = cache.load(key, NO_ANSWER_MAX_AGE_S)
    with world.collective("broadcasting the cached report about windows on devices"):
        return world.comm.bcast(cached)


def allocation_error(device: Device, num_bytes: int) -> str | None:
    """Allocate memory for windows on a device; return the error message, or None."""
    try:
        device.empty_for_windows(num_bytes)
    except UserError as error:
        return str(error)
    return None


def cuda_support() -> bool | None:
    """Return True if the MPI library reports CUDA support; None if it has no function for that."""
    for path in _mapped_libraries(r"libmpi\w*"):
        function = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if function is not None:
            return bool(function())
    return None


def alloc_kinds() -> str | None:
    """Return the kinds of memory that the MPI library reports to support; None if it does not report them."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or MPI.INFO_ENV.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds


class DeviceBuffer(Buffer):
    """A buffer at the origin, in memory of a device."""

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
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], device: Device, on_message: OnMessage
) -> ProbeReport:
    window_buffers: list[DeviceBuffer] = []  # MPI does not keep references to them

    def allocate(world: World, values: np.ndarray) -> Sequence[MPI.Win]:
        window_buffers.append(DeviceBuffer(device, values))
        return [MPI.Win.Create(window_buffers[-1].memory, 1, MPI.INFO_NULL, world.comm)]

    origins: dict[str, Callable[[np.ndarray], Buffer]]
    origins = {"from_device": lambda values: DeviceBuffer(device, values), "from_host": Buffer}
    trials = Trials(world, pairs, BUDGET, LARGE_BYTES[-1], allocate, origins)
    for name, origin in DEVICE_OPERATIONS:
        for kind in pairs:
            on_message(report, f"{origin}.{kind}.{name}")
            report = report.with_operation((origin, kind, name), *trials.run(name, kind, origin))
    trials.close()
    return report


def _try_self(world: World, device: Device) -> bool:
    """Accumulate twice to this rank's own window; return True if the sum is correct. Collective."""
    window = DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device)
    values = device.empty_for_windows(_SELF_TEST_NUMEL * 4).view(torch.float32)
    values.copy_(torch.arange(_SELF_TEST_NUMEL, dtype=torch.float32))
    device.record_event().synchronize()
    world.wait_collective(world.comm.Ibarrier(), "creating the windows of a probe")
    for _ in range(2):
        window.accumulate(world.rank, 0, as_mpi_buffer(values))
    window.flush()
    window.sync()
    is_correct = bool((window.tensor == 2 * values).all())
    window.free()
    return is_correct


def _mapped_libraries(name: str) -> list[str]:
    """Return the files of loaded libraries whose names before the suffix match a pattern."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(rf"/\S*/{name}\.so[\d.]*$", maps, re.MULTILINE)))
