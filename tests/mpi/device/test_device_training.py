"""By which words a run comes to have windows on a device, with host memory in its place."""

from types import SimpleNamespace

import pytest
import torch
from late_device import LateDevice
from test_device_transport import LateDeviceWindow
from torch import nn

from odc_mpi import api
from odc_mpi.comm import factory
from odc_mpi.comm.device import device_memory
from odc_mpi.comm.device.device import find_device
from odc_mpi.comm.device.device_memory import device_shard_bytes
from odc_mpi.comm.device.device_stores import DeviceParameters, SingleRankParameters
from odc_mpi.comm.device.staged import StagedParameters
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.reduce import slots
from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.probe import cache
from odc_mpi.probe.device_decision import RUN_DOCTOR
from odc_mpi.probe.device_probe import device_cache_key
from odc_mpi.probe.report import OperationResult, Peer, Peers, ProbeReport

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

PROVED = OperationResult(one_sided=True, idle_s=1e-6, busy_s=1e-6, gb_per_s=100.0)


@pytest.fixture
def device(monkeypatch, tmp_path):
    return pose_as_device(monkeypatch, tmp_path)


def pose_as_device(monkeypatch, tmp_path):
    """Use host memory in place of a GPU that other ranks cannot map, with a separate cache of verdicts."""

    def export(memory):
        raise UserError("CUDA cannot export it")

    made = LateDevice()
    monkeypatch.setattr(made, "export", export)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(api, "find_device", lambda kind, local_rank: made if kind == "cuda" else None)
    for module in (factory, slots):
        monkeypatch.setattr(module, "DeviceWindow", LateDeviceWindow)
    return made


def transport_for(world, decision):
    return api._transport(world, LateDevice(), api.torch.float32, api.torch.float32, decision, decision.comm, None)


def keep_verdict(world, device, **operations):
    """As a doctor would in this layout."""
    key = device_cache_key(world, device)
    if world.rank == 0:
        peers = Peers(same_node=Peer(**operations)) if world.size > 1 else Peers()
        report = ProbeReport(nodes=1, ranks_per_node=(world.size,)).with_device(window=True, peers=peers)
        cache.store(key, report.with_problem("device same_node accumulate", "crashed (SIGSEGV on rank 1)"))


def test_a_run_has_windows_on_its_device_where_a_doctor_has_proved_them(world, device):
    # The only rank needs no proof.
    decision = api.decide_for(world, CommConfig(zero_copy="off" if world.size == 1 else "auto"), device="cuda")
    assert decision.window_device.value == "cpu" and RUN_DOCTOR in decision.one_line()
    assert isinstance(transport_for(world, decision).parameters, StagedParameters)

    keep_verdict(world, device, get=PROVED, put=PROVED)
    decision = api.decide_for(world, device="cuda")
    assert (decision.window_device.value, decision.reduction.value) == ("cuda", "mailbox")
    assert world.size == 1 or "SIGSEGV" in decision.reduction.reason
    # The only rank has all of it before it.
    assert isinstance(
        transport_for(world, decision).parameters, SingleRankParameters if world.size == 1 else DeviceParameters
    )
    # Where the rest is set nothing is tried, and the verdict counts all the same.
    decision = api.decide_for(world, CommConfig(zero_copy="off", reduction="mailbox", progress="off"), device="cuda")
    assert decision.window_device.value == "cuda"
    assert isinstance(transport_for(world, decision).parameters, DeviceParameters)

    decision = api.decide_for(world, CommConfig(window_device="cpu"), device="cuda")
    assert isinstance(transport_for(world, decision).parameters, StagedParameters)
    assert api.decide_for(world).window_device is None


def test_ranks_of_a_node_map_each_others_devices(world, monkeypatch):
    monkeypatch.setattr(api, "find_device", lambda kind, local_rank: LateDevice())
    decision = api.decide_for(world, CommConfig(zero_copy="off"), device="cuda")
    assert (decision.window.value, decision.window_device.value, decision.reduction.value) == ("map", "cuda", "mailbox")


def test_a_torch_for_rocm_computes_on_its_gpus_with_windows_on_the_host(world, monkeypatch):
    properties = SimpleNamespace(uuid=world.rank)
    results = {"is_available": True, "device_count": 1, "set_device": None, "Stream": None, "memory_allocated": 0}
    results |= {"get_device_name": "MI300X", "get_device_properties": properties, "memory_reserved": 0}
    for name, result in {**results, "mem_get_info": (2**30, 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert api.choose_device(world) == ("cuda", "each rank has a GPU")
    assert find_device("cuda", world.host_rank).name == "MI300X (1 visible), ROCm 6.4"
    choice = api.decide_for(world, CommConfig(zero_copy="off"), device="cuda").window_device
    assert choice.value == "cpu" and "needs an NVIDIA GPU, but torch is built for ROCm" in choice.reason


def test_an_intel_xpu_is_not_used(world, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert api.choose_device(world) == ("cpu", "torch finds only an Intel XPU, which is not supported")


def test_windows_on_a_device_go_with_a_model_there(world):
    with pytest.raises(UserError, match=r"comm.window_device: cuda requires run.device cuda"):
        api.decide_for(world, CommConfig(window_device="cuda"))


@pytest.mark.sizes(1)
def test_the_only_rank_refuses_the_graph_of_parameters_that_have_changed(world, device):
    """It keeps them in the graph, so nothing but this would notice."""
    decision = api.decide_for(world, CommConfig(window_device="cuda"), device="cuda")
    model = api.shard_model(torch.nn.Linear(3, 1), world, device="cuda", comm=decision)
    assert isinstance(model._transport.parameters, SingleRankParameters)
    with model.minibatch():
        late, later, now = (model(torch.ones(1, 3)).sum() for _ in range(3))
        now.backward()
    with pytest.raises(RuntimeError, match=r"evaluate or save after publish\(\)"):
        late.backward()
    model.publish()
    with model.minibatch(), pytest.raises(RuntimeError, match=r"backward after publish\(\)"):
        later.backward()
    model.publish()
    model.close()


def test_shards_that_exceed_the_memory_of_a_gpu_are_on_the_host(world, monkeypatch):
    device = LateDevice()  # with 1 GiB of free memory
    monkeypatch.setattr(api, "find_device", lambda kind, local_rank: device)
    monkeypatch.setattr(device_memory, "gpu_uuid", lambda host_rank: "shared")
    share = int(0.75 * 2**30) // world.size
    for size, wanted in ((share, "cuda"), (share + 1, "cpu")):
        needed = size if world.rank == world.size - 1 else 0
        choice = api.decide_for(world, device="cuda", shard_bytes=needed).window_device
        assert choice.value == wanted
    assert choice.reason.startswith(f"the shards of rank {world.size - 1} need ")
    module = nn.Linear(1000, 100, dtype=torch.bfloat16)
    module.bias.requires_grad_(False)
    counts = [device_shard_bytes(module, 3, torch.bfloat16, torch.float32, with_optimizer=on) for on in (False, True)]
    assert counts == [-(-(100_100 * 2 + 100_000 * 4) // 3), -(-(100_100 * 2 + 100_000 * 16) // 3)]


def test_islands_have_windows_on_the_host_of_ranks_with_a_gpu(world, monkeypatch):
    device = LateDevice()
    monkeypatch.setattr(api, "find_device", lambda kind, local_rank: device)
    choice = api.decide_for(world, device="cuda", islands=True).window_device
    assert (choice.value, choice.reason) == ("cpu", "islands exchange parameters through host memory")
    model = api.shard_model(nn.Linear(8, 8), world, device="cuda", islands=Islands(world, "node"))
    assert isinstance(model._transport.parameters, StagedParameters)
    model.close()
