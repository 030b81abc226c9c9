"""Plain parameters in place of those on demand, for many forwards in a row that need no gradients.

A parameter on demand costs some microseconds of Python at each call of its unit, a part of a decode step that counts.
Meanwhile modules hold tensors here, and a forward costs what it costs an unsharded module.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from odc_mpi.shard.partition import ParamModuleInfo, names_by_module
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits


@contextmanager
def materialized_parameters(
    param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], ready: UnshardedUnits
) -> Iterator[None]:
    """Put whole parameters without gradients into the modules in the enclosed code. One-sided; fetches what is missing.

    Nothing may release units meanwhile. Does nothing inside itself.

    Args:
        param_infos: Of the sharded parameters.
        units: That hold them; all of them are ready at once, or look into memory that stays.
        ready: Fetches them; forwards are no calls of units meanwhile (`UnitForwards.suspended`).

    Raises:
        RuntimeError: A parameter was changed in place.
    """
    if ready.is_reshard_forbidden:
        yield
        return
    whole: dict[str, nn.Parameter] = {}
    with torch.inference_mode(False):  # tensors of an inference would be of no use to anybody else
        for unit in units:
            ready.unshard(unit)
            whole |= {name: nn.Parameter(unit.parameter(name), requires_grad=False) for name in unit.ranges}
    with ExitStack() as back, ready.no_reshard():
        for module, keys in names_by_module(param_infos).items():
            on_demand = module._parameters
            back.callback(module.__dict__.__setitem__, "_parameters", on_demand)
            plain = {key: whole[keys[key]] if key in keys else other for key, other in on_demand.items()}
            module.__dict__["_parameters"] = plain
        yield
    for unit in units:
        unit.check_unchanged()
