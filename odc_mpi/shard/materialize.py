"""Materialized parameters, for many forwards without gradients.

A parameter that is fetched on demand costs some microseconds of Python per forward of its unit, which is significant in
a decoding step. With materialized parameters a forward is as fast as that of an unsharded module.
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
    param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], unsharded: UnshardedUnits
) -> Iterator[None]:
    """Put full parameters without gradients into the modules in the enclosed code; fetch missing units. One-sided.

    The units must fit the cache at once, or be views that stay valid; they must not be resharded in the enclosed code.
    Forwards are not tracked there (`UnitForwards.suspended`). No effect within another call.

    Raises:
        RuntimeError: A parameter was changed in place.
    """
    if unsharded.is_reshard_forbidden:
        yield
        return
    full: dict[str, nn.Parameter] = {}
    with torch.inference_mode(False):  # code outside of inference mode could not use inference tensors
        for unit in units:
            unsharded.unshard(unit)
            full |= {name: nn.Parameter(unit.parameter(name), requires_grad=False) for name in unit.ranges}
    with ExitStack() as restored, unsharded.no_reshard():
        for module, keys in names_by_module(param_infos).items():
            on_demand = module._parameters
            restored.callback(module.__dict__.__setitem__, "_parameters", on_demand)
            plain = {key: full[keys[key]] if key in keys else other for key, other in on_demand.items()}
            module.__dict__["_parameters"] = plain
        yield
    for unit in units:
        unit.check_unchanged()
