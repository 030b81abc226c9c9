"""Sizes of caches that are wrong on one rank, the memory that ranks of a GPU share, and a rank that needs no cache."""

import pytest
import torch
from late_device import LateDevice
from torch import nn
from units import Block

from odc_mpi import api, shard_model
from odc_mpi.comm.device import device_memory
from odc_mpi.comm.settings import CommConfig

pytestmark = pytest.mark.mpi


def blocks():
    return nn.Sequential(*(Block() for _ in range(6)))


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_ranks_share_the_memory_of_a_gpu_with_the_same_uuid(world, monkeypatch, num_gpus):
    """Each rank sees one GPU, as under `srun --gpus-per-task=1`: only the UUID shows if it is the same one."""
    device = LateDevice()
    device.free_bytes = lambda: 12_000
    monkeypatch.setattr(api, "find_device", lambda kind, host_rank: device)
    monkeypatch.setattr(device_memory, "gpu_uuid", lambda host_rank: f"GPU-{world.rank % num_gpus}")
    comm = CommConfig(zero_copy="off", reduction="accumulate", progress="off")
    model = shard_model(blocks(), world, units=[Block], comm=comm, device="cuda")
    assert model.cache_bytes.parameters == 6_000 // (world.size if num_gpus == 1 else 1)
    model.close()


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
def test_a_single_rank_adds_gradients_to_its_shards_without_a_buffer(world, reduction):
    torch.manual_seed(0)
    plain, sharded = blocks(), blocks()
    sharded.load_state_dict(plain.state_dict())
    model = shard_model(sharded, world, units=[Block], comm=CommConfig(reduction=reduction))
    shard_bytes = model.usage.peak_gradient_bytes
    inputs = torch.randn(3, 4, next(plain.parameters()).shape[-1])
    with model.minibatch():
        for each in inputs:
            plain(each).square().sum().backward()
            model(each).square().sum().backward()
    assert (model.usage.peak_gradient_bytes == shard_bytes) is (world.size == 1)
    if world.size == 1:
        gradients = [parameter.grad for parameter in model.shard_parameters()]
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad.flatten(), rtol=0, atol=0)
    model.close()
