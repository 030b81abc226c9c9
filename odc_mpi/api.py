"""Shard a module over the ranks of a world: the choice of transport, and the call that users make."""

from collections.abc import Iterable

import torch
from torch import nn

from odc_mpi.comm.window import WindowTransport
from odc_mpi.comm.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import UnitChoice
from odc_mpi.shard.slices import Weights


def shard_model(
    module: nn.Module,
    world: World,
    *,
    units: Iterable[UnitChoice] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    prefetch: int = 1,
    weights: Weights | None = None,
) -> ShardedModel:
    """Move a module's parameters into MPI windows, a shard on every rank. Collective.

    Args:
        module: Any module. Where ranks hold different values, those of rank 0 count.
        world: The ranks.
        units: Classes, class names or submodules whose parameters are fetched together, such as a transformer's block;
            by default the module's `_no_split_modules`. What is left is the root unit, which stays for a whole
            minibatch.
        param_dtype: In which parameters are hosted, fetched and computed with; by default the module's own. Where it is
            narrower than fp32, owners keep an fp32 master of their slices for the optimizer.
        reduce_dtype: In which gradients are summed: float32 or float64, by default the wider of float32 and
            `param_dtype`.
        activation_checkpointing: Keep only the inputs of each unit for the backward, and run its forward again there.
        prefetch: How many units to fetch ahead of their use, beside the computation; each beyond the first takes memory
            for one more unit. With 0 no thread is started; with 1 or more, gradients are pushed from a thread, too.
        weights: Where initial parameters come from if not from the module, which may then be on the meta device.

    Returns:
        The model. Gradients of all microbatches of all ranks are summed.

    Raises:
        ValueError: Nothing to train, units that match nothing, parameters without values or of mixed types.
        UserError: Too little shared memory for the windows.
    """
    if param_dtype is None:
        param_dtype = _own_dtype(module)
    if reduce_dtype is None:
        reduce_dtype = torch.promote_types(param_dtype, torch.float32)
    transport = WindowTransport(world, param_dtype, reduce_dtype)
    model = ShardedModel(
        module,
        transport,
        units=units,
        weights=weights,
        activation_checkpointing=activation_checkpointing,
        prefetch=prefetch,
    )
    # Before the windows go, the slices must let go of them.
    world.on_close(model.close)
    return model


def _own_dtype(module: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if len(dtypes) > 1:
        raise ValueError(
            f"the module's parameters are of {len(dtypes)} types {sorted(map(str, dtypes))}: choose a param_dtype"
        )
    return next(iter(dtypes), torch.float32)
