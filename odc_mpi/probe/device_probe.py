"""Trials of windows on devices, needed because MPI libraries do not reliably report whether they support them.

All ranks map each other's memory, which needs no MPI, and create a window. For each kind of peer, one pair of ranks
tries Get, Put and Accumulate, with device memory at the origin as well, and tests each of them for stale reads
(`probe.trial`). Then every rank accumulates into its own window.

Because an unsupported operation may crash the process or never return, these trials run only in child processes of
`odc-mpi doctor`, which caches the results. Training runs only read the cache.
"""

import ctypes
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.device_window import DeviceWindow, mapping_error
from odc_mpi.comm.windows.rma import as_mpi_buffer, messages
from odc_mpi.errors import UserError
from odc_mpi.probe import cache, gpu
from odc_mpi.probe.operations import Buffer
from odc_mpi.probe.report import DEVICE_OPERATIONS, NO_ANSWER, OnMessage, Peers, ProbeReport
from odc_mpi.probe.trial import LARGE_BYTES, TrialBudget, Trials
from odc_mpi.runtime.world import World

#: Time limits for each trial, shorter than in `probe.FULL` because each operation is also tested for stale reads.
BUDGET = TrialBudget(idle_s=0.05, busy_s=(0.2, 0.6, 0.6), bandwidth_s=0.3, num_staleness_reads=10_000, staleness_s=3.0)
#: Maximum age of a cached report, in seconds. Its cache key covers devices, drivers and libraries.
MAX_AGE_S = 30 * 24 * 3600.0
#: Maximum age of a cached report in which a trial gave no answer, in seconds. The machine may merely have been busy, or
#: slow to load libraries.
NO_ANSWER_MAX_AGE_S = 24 * 3600.0
#: Number of elements that each rank adds to its own window.
_SELF_TEST_NUMEL = 100_000


def try_device(
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], device: Device, on_message: OnMessage
) -> ProbeReport:
    """Try windows on the devices of all ranks, and return `report` with the results added. Collective."""
    device.set_current()
    world.prepare_threads(device.set_current)
    names = tuple(sorted(set(world.gather_objects(device.name))))
    report = report.with_device(names=names, cuda_support=cuda_support())
    on_message(report, "device memory")
    if error := allocation_error(world, device, LARGE_BYTES[-1]):
        return report.with_problem("device memory", error)
    on_message(report, "device mapping")
    report = report.with_device(mapping_error=mapping_error(world, device) or "")
    on_message(report, "device window")
    DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device).free()
    report = report.with_device(window=True)
    if pairs:
        report = _try_pairs(world, report, pairs, device, on_message)
    on_message(report, "device own")
    return report.with_device(own_accumulate=all(world.gather_objects(_try_self(world, device))))


def device_cache_key(world: World, device: Device) -> dict[str, Any]:
    """Return the cache key of a report about windows on devices. Collective.

    It names devices but no hosts, so the report is also valid on other nodes with the same devices. It also names the
    loaded UCX library, whose version is independent of the MPI library's.
    """
    return {
        **cache.stack_key(MPI.Get_library_version()),
        "ucx": _mapped_libraries("libucp"),
        "driver": gpu.driver(),
        "devices": world.gather_objects([world.node, device.name]),
    }


def load_device_report(world: World, device: Device) -> ProbeReport | None:
    """Load the cached report of `odc-mpi doctor` for the current layout of ranks and devices. Collective.

    Returns None if the cache has no report for this software and layout, or only one that is too old.
    """
    key = device_cache_key(world, device)
    cached = cache.load(key, MAX_AGE_S) if world.rank == 0 else None
    if cached is not None and any(f": {NO_ANSWER}" in problem for problem in cached.problems):
        cached = cache.load(key, NO_ANSWER_MAX_AGE_S)
    return world.gather_objects(cached)[0]


def allocation_error(world: World, device: Device, num_bytes: int) -> str | None:
    """Try to allocate memory for windows on every rank. Return an error message, or None on success. Collective."""
    try:
        world.run_on_all(lambda: device.empty_for_windows(num_bytes))
    except UserError as error:
        return str(error)
    return None


def cuda_support() -> bool | None:
    """Return the result of MPIX_Query_cuda_support, or None if the MPI library lacks this function."""
    for path in _mapped_libraries(r"libmpi\w*"):
        function = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if function is not None:
            return bool(function())
    return None


class DeviceBuffer(Buffer):
    """Buffer in device memory with the initial content `values`."""

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

    @override
    def contains(self, value: int, num_bytes: int) -> bool:
        return bool((self.tensor[:num_bytes] == value).all())


def _try_pairs(
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], device: Device, on_message: OnMessage
) -> ProbeReport:
    def allocate(world: World, values: np.ndarray) -> tuple[Sequence[MPI.Win], Buffer]:
        buffer = DeviceBuffer(device, values)
        return [MPI.Win.Create(buffer.memory, 1, MPI.INFO_NULL, world.comm)], buffer

    trials = Trials(
        world,
        pairs,
        BUDGET,
        LARGE_BYTES[-1],
        allocate,
        partial(DeviceBuffer, device),
        staleness_tests=DEVICE_OPERATIONS,
    )
    peers = Peers()
    for name in DEVICE_OPERATIONS:
        for kind in pairs:
            on_message(report, f"device {kind} {name}")
            result, problem = trials.run(name, kind)
            peers = peers.with_result(kind, name, result)
            report = report.with_device(peers=peers).with_problem(f"device {kind} {name}", problem)
    trials.close()
    return report


def _try_self(world: World, device: Device) -> bool:
    """Accumulate twice into this rank's own window, and return True if the sum is correct. Collective."""
    window = DeviceWindow(world, _SELF_TEST_NUMEL, torch.float32, device)
    values = device.empty_for_windows(_SELF_TEST_NUMEL * 4).view(torch.float32)
    values.copy_(torch.arange(_SELF_TEST_NUMEL, dtype=torch.float32))
    device.record_event().synchronize()
    world.wait_collective(world.comm.Ibarrier(), "creating the windows of a probe")
    for _ in range(2):
        window.accumulate_messages(as_mpi_buffer(values), messages(world.rank, 0, _SELF_TEST_NUMEL))
    window.flush()
    window.sync()
    is_correct = bool((window.tensor == 2 * values).all())
    window.free()
    return is_correct


def _mapped_libraries(name: str) -> list[str]:
    """Return the paths of the loaded libraries whose file names before ".so" match the regular expression `name`."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(rf"/\S*/{name}\.so[\d.]*$", maps, re.MULTILINE)))
