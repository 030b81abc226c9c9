"""Sizes of caches that are wrong on one rank, and the memory that ranks of a GPU share."""

import pytest
from late_device import LateDevice
from torch import nn
from units import Block

from odc_mpi import api, shard_model
from odc_mpi.api import decide_for
from odc_mpi.comm.device import device_memory
from odc_mpi.errors import AllRanksUserError

pytestmark = pytest.mark.mpi


def blocks():
    return nn.Sequential(*(Block() for _ in range(6)))


@pytest.mark.parametrize("wrong", ["2G", -1, 0.5])
def test_a_size_that_is_none_on_one_rank_is_refused_on_all(world, wrong):
    size = wrong if world.rank == world.size - 1 else "auto"
    with pytest.raises(AllRanksUserError, match=f"gradient_cache_bytes: expected .*, got {wrong!r}"):
        shard_model(blocks(), world, gradient_cache_bytes=size)


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_ranks_share_the_memory_of_a_gpu_with_the_same_uuid(world, monkeypatch, num_gpus):
    """Each rank sees one GPU, as under `srun --gpus-per-task=1`: only the UUID shows if it is the same one."""
    device = LateDevice()
    device.free_bytes = lambda: 12_000
    monkeypatch.setattr(api, "find_device", lambda kind, host_rank: device)
    monkeypatch.setattr(device_memory, "gpu_uuid", lambda host_rank: f"GPU-{world.rank % num_gpus}")
    decision = decide_for(world, zero_copy="off", reduction="accumulate", progress="off")
    model = shard_model(blocks(), world, units=[Block], decision=decision, device="cuda")
    assert model.cache_bytes.parameters == 6_000 // (world.size if num_gpus == 1 else 1)
    model.close()
