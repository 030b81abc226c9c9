"""Windows on devices are tried with all peers; host memory stands in for a device."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from late_device import LateDevice, LateEvent

from odc_mpi.errors import UserError
from odc_mpi.probe import cache, device_probe, operations, probe, trial
from odc_mpi.probe.device_decision import summarize
from odc_mpi.probe.device_probe import device_cache_key, load_device_report
from odc_mpi.probe.report import DEVICE_OPERATIONS, INCONCLUSIVE, STALE, WRONG, ProbeReport

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # Large operations are reached on a busy machine, too.
    monkeypatch.setattr(device_probe, "BUDGET", replace(probe.QUICK, bandwidth_s=5.0))


@pytest.fixture
def less(monkeypatch):
    """No operations of 16 MiB, which go over such a window in seconds."""
    monkeypatch.setattr(trial, "LARGE_BYTES", trial.LARGE_BYTES[:2])
    monkeypatch.setattr(device_probe, "LARGE_BYTES", trial.LARGE_BYTES)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "name", ["get", pytest.param("put", marks=pytest.mark.slow), pytest.param("accumulate", marks=pytest.mark.slow)]
)
def test_wrong_data_is_reported_for_devices(world, monkeypatch, less, name):
    run = operations.ProbeLink._run

    def forgetful(self, tried, num_bytes):
        if tried == name and num_bytes >= 1 << 20:
            self.received.fill(7, num_bytes)
        else:
            run(self, tried, num_bytes)

    pairs = probe.find_pairs(world.gather_objects(world.node))
    monkeypatch.setattr(operations.ProbeLink, "_run", forgetful)
    found = device_probe.try_device(world, ProbeReport(), pairs, LateDevice(), lambda *_: None)
    problems = [problem for problem in found.problems if INCONCLUSIVE not in problem]  # on a busy machine
    assert problems == [f"device same_node {name}: {WRONG}"]
    assert found.wrong_data(f"device same_node {name}") and not found.wrong_data(f"same_node {name}")
    answered = {other for other in DEVICE_OPERATIONS if getattr(found.device.peers.same_node, other).idle_s is not None}
    assert answered == set(DEVICE_OPERATIONS) - {name}


class LateMemory(torch.Tensor):
    """Memory of a device, filled by kernels that run when something waits for a later event."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        fill = partial(super().__torch_function__, function, types, arguments, options or {})
        return cls.device.later(fill) if function is torch.Tensor.fill_ else fill()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("waits", [True, False])
def test_a_value_announced_before_the_event_of_its_write_is_an_old_one(world, monkeypatch, waits):
    monkeypatch.setattr(device_probe, "LARGE_BYTES", trial.STALENESS_BYTES)
    monkeypatch.setattr(device_probe, "mapping_error", lambda world, device: "no file")
    monkeypatch.setattr(device_probe, "BUDGET", replace(probe.QUICK, num_staleness_reads=6, staleness_s=60.0))

    class Kernels(LateDevice):
        def empty_for_windows(self, num_bytes):
            return super().empty_for_windows(num_bytes).as_subclass(LateMemory)

        def record_event(self):
            return super().record_event() if waits else LateEvent(self, 0)

    monkeypatch.setattr(LateMemory, "device", Kernels(), raising=False)
    report = ProbeReport(nodes=1, ranks_per_node=(2,))
    pairs = probe.find_pairs(world.gather_objects(world.node))
    found = device_probe.try_device(world, report, pairs, LateMemory.device, lambda *_: None)
    late = [problem for problem in found.problems if STALE in problem]
    assert late == ([] if waits else [f"device same_node {name}: {STALE}" for name in DEVICE_OPERATIONS])
    reads = [getattr(found.device.peers.same_node, name).num_fresh_reads for name in DEVICE_OPERATIONS]
    assert reads == [6 if waits else 0] * 3
    assert (STALE in (summarize(found).objection or "")) != waits


def test_without_memory_for_windows_nothing_is_tried(world):
    class NoCupy(LateDevice):
        def empty_for_windows(self, num_bytes):
            raise UserError("no CuPy")

    device = NoCupy() if world.rank == world.size - 1 else LateDevice()
    found = device_probe.try_device(world, ProbeReport(), {}, device, lambda *_: None)
    where = f" (on rank {world.size - 1})" if world.size > 1 else ""
    assert list(found.problems) == [f"device memory: no CuPy{where}"]
    assert found.device.window is None


def test_a_wrong_sum_in_the_local_window_is_reported(world, monkeypatch):
    monkeypatch.setattr(device_probe.DeviceWindow, "accumulate_messages", lambda *_: None)
    found = device_probe.try_device(world, ProbeReport(), {}, LateDevice(), lambda *_: None)
    assert found.device.own_accumulate is False


def test_a_kept_verdict_serves_all_ranks_in_the_same_layout_only(world, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # only rank 0's file counts
    device = LateDevice()
    assert load_device_report(world, device) is None
    key = device_cache_key(world, device)
    report = ProbeReport(nodes=1, ranks_per_node=(world.size,)).with_device(window=True)
    if world.rank == 0:
        cache.store(key, report)
    assert load_device_report(world, device) == report
    other = LateDevice()
    other.name = "another"
    assert load_device_report(world, other) is None
    with monkeypatch.context() as patch:
        patch.setattr(device_probe, "_mapped_libraries", lambda name: ["/elsewhere/libucp.so.0"])
        assert load_device_report(world, device) is None
    monkeypatch.setattr(world, "node", world.node + world.rank)
    assert (load_device_report(world, device) is None) == (world.size > 1)


def test_a_verdict_that_is_a_time_out_is_kept_for_a_shorter_time(world, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, now_s = LateDevice(), time.time()
    key = device_cache_key(world, device)
    tried = ProbeReport(nodes=1, ranks_per_node=(world.size,)).with_device(window=True)
    for problem, after_two_days in (("crashed (SIGSEGV on rank 1)", True), ("no answer within 12 s", False)):
        if world.rank == 0:
            cache.store(key, tried.with_problem("device same_node get", problem))
        assert load_device_report(world, device) is not None
        with monkeypatch.context() as patch:
            patch.setattr(cache.time, "time", lambda: now_s + 2 * 24 * 3600)
            assert (load_device_report(world, device) is not None) == after_two_days


def test_no_device_unless_every_rank_has_one(world, monkeypatch):
    monkeypatch.setattr(probe, "has_gpu", lambda: False)
    assert probe.device_on_all_ranks(world) is None
    monkeypatch.setattr(probe, "has_gpu", lambda: world.rank == 0)
    monkeypatch.setattr("odc_mpi.comm.device.device.find_device", lambda *_: LateDevice())
    assert (probe.device_on_all_ranks(world) is None) == (world.size > 1)
    monkeypatch.setattr(probe, "has_gpu", lambda: True)
    assert isinstance(probe.device_on_all_ranks(world), LateDevice)
