"""Memory of GPUs, which ranks may share, and whether the shards of a model fit into it."""

import torch
from torch import nn

from odc_mpi.comm.device.device import Device, gpu_uuid
from odc_mpi.formatting import format_size
from odc_mpi.runtime.world import World

#: Maximum share of a GPU's free memory for shards. The rest is for units in use, gradients in transit and activations.
MAX_SHARDS_SHARE = 0.75
#: Size in bytes of the AdamW state per trainable element: two moments in fp32.
OPTIMIZER_BYTES = 8
#: Size in bytes of an fp32 copy of an element.
_MASTER_BYTES = 4


def free_device_bytes(world: World, device: Device) -> tuple[int, int]:
    """Return the free memory of this rank's GPU in bytes, and the number of ranks that share the GPU. Collective."""
    # By identity: each rank of a host may see only a GPU of its own.
    uuid = gpu_uuid(world.host_rank)
    return device.free_bytes(), world.gather_objects(uuid).count(uuid)


def device_shard_bytes(
    module: nn.Module,
    num_ranks: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    *,
    with_optimizer: bool,
) -> int:
    """Return the size in bytes of a rank's shards of a module's parameters and gradients.

    `with_optimizer` adds the AdamW state. `param_dtype` is the dtype of all parameters, or None if each keeps its own.
    """
    num_bytes = 0
    for parameter in module.parameters():
        itemsize = (param_dtype or parameter.dtype).itemsize
        trained_bytes = reduce_dtype.itemsize
        if with_optimizer:
            trained_bytes += OPTIMIZER_BYTES + (_MASTER_BYTES if itemsize < _MASTER_BYTES else 0)
        num_bytes += parameter.numel() * (itemsize + trained_bytes * parameter.requires_grad)
    return -(-num_bytes // num_ranks)


def fit_objection(world: World, device: Device, shard_bytes: int) -> str | None:
    """Return the reason why a rank's shards do not fit on its GPU, or None if all ranks' shards fit. Collective.

    `shard_bytes` is the size of this rank's shards. The result is the same on all ranks.
    """
    free, num_ranks = free_device_bytes(world, device)
    available = int(MAX_SHARDS_SHARE * free) // num_ranks
    for rank, (needed, granted) in enumerate(world.gather_objects((shard_bytes, available))):
        if needed > granted:
            return (
                f"the shards of rank {rank} need {format_size(needed)}, more than the {format_size(granted)} that its "
                "GPU has for shards"
            )
    return None
