"""What happens to the module itself: parameters on demand, calls of units, guards against misusing placeholders."""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from odc_mpi.comm.transport import Transport
from odc_mpi.shard.autograd import SavedTensorHooks, UnitForwards
from odc_mpi.shard.partition import ParamModuleInfo, names_by_module, replicated_tensors
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits


class OnDemandParameters(dict[str, Any]):
    """A module's `_parameters` in which looking up a sharded parameter fetches it.

    Iterating, as `module.parameters()` does, shows placeholders: right shape, dtype and device, no memory, NaN.

    Args:
        placeholders: What iterating shows, by key.
        find: Gives the parameter of a dotted name.
        names: Dotted name of every key that is sharded.
    """

    def __init__(
        self, placeholders: dict[str, nn.Parameter | None], find: Callable[[str], torch.Tensor], names: dict[str, str]
    ) -> None:
        super().__init__(placeholders)
        self._find = find
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._names:
            raise RuntimeError(f"{self._names[key]} is sharded: expected changes to its slices, not a new parameter")
        super().__setitem__(key, value)

    def __getitem__(self, key: str) -> torch.Tensor | None:
        name = self._names.get(key)
        return super().__getitem__(key) if name is None else self._find(name)


def placeholder(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter that has a shape but no memory of its own; whoever computes with it gets NaN."""
    nan = torch.full((), float("nan"), dtype=dtype, device=device)
    return nn.Parameter(nan.expand(parameter.shape), requires_grad=parameter.requires_grad)


class Placeholders:
    """What stands in the module for its parameters, and what must not be done with it.

    Args:
        tensors: The placeholders by dotted name.
        originals: The parameters that they stand for; not kept alive.
        modules: That have placeholders, which their `state_dict()` would save.
    """

    def __init__(
        self, tensors: Mapping[str, nn.Parameter], originals: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]
    ) -> None:
        self._can_be_saved = False
        for module in modules:
            module.register_state_dict_pre_hook(self._check_saved)
        self._tensors = dict(tensors)
        self._names = {id(parameter): name for name, parameter in tensors.items()}
        self._originals = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in originals.items()}
        self._trained = {name: parameter.requires_grad for name, parameter in tensors.items()}

    def tensors(self) -> list[torch.Tensor]:
        """Return the placeholders, and the parameters that they stand for as far as there still are any."""
        originals = [original() for _, original in self._originals.values()]
        return [*self._tensors.values(), *(original for original in originals if original is not None)]

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Allow the `state_dict()` of the modules in the enclosed code."""
        self._can_be_saved = True
        try:
            yield
        finally:
            self._can_be_saved = False

    def check_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse that an optimizer has placeholders, or what they stand for: neither is trained."""
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None and id(parameter) in self._originals:
                original_name, original = self._originals[id(parameter)]
                name = original_name if original() is parameter else None  # an address may be used again
            if name is not None:
                raise RuntimeError(
                    f"an optimizer was given {name} of the module, which training does not change: give the optimizer "
                    "model.shard_parameters()"
                )

    def check_frozen(self) -> None:
        """Refuse that what is to be trained has changed since the parameters were sharded."""
        for name, parameter in self._tensors.items():
            if parameter.requires_grad is not self._trained[name]:
                now = "frozen" if self._trained[name] else "made trainable"
                raise RuntimeError(
                    f"{name} was {now} after shard_model, which changes nothing: set requires_grad before shard_model"
                )

    def _check_saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._can_be_saved:
            raise RuntimeError(
                "this module's parameters are sharded: expected state_dict() of the sharded model instead"
            )


def replicate(module: nn.Module, transport: Transport) -> None:
    """Give every rank rank 0's buffers and integer parameters, where it computes. Collective."""
    for _, tensor in replicated_tensors(module):
        if not tensor.is_meta:
            whole = tensor.detach().contiguous().cpu()
            transport.group.broadcast(whole)
            if tensor.device != transport.device:
                # In place, as `nn.Module.to` does it: somebody else may hold the same tensor.
                tensor.data = tensor.data.to(transport.device)
            tensor.detach().copy_(whole)


def install_on_demand_parameters(
    param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], transport: Transport, calls: UnitForwards
) -> Placeholders:
    """Replace parameters by such that are fetched when touched, to where the transport's fetches land."""
    unit_of = {name: unit for unit in units for name in unit.ranges}

    def find(name: str) -> torch.Tensor:
        return calls.parameter(unit_of[name], name)

    names = names_by_module(param_infos)
    # One for all places of a tied parameter, as it was one parameter.
    shown: dict[str, nn.Parameter] = {}
    originals: dict[str, nn.Parameter] = {}
    for submodule, keys in names.items():
        for key, name in keys.items():
            if name not in shown:
                originals[name] = cast(nn.Parameter, submodule._parameters[key])
                unit = unit_of[name]
                dtype = transport.parameters.dtype_of(unit.indices[unit.ranges[name][0]])
                shown[name] = placeholder(originals[name], dtype, transport.device)
        items = {key: shown[keys[key]] if key in keys else p for key, p in submodule._parameters.items()}
        submodule.__dict__["_parameters"] = OnDemandParameters(items, find, keys)
        if isinstance(submodule, nn.RNNBase):
            _refresh_flat_weights(submodule)
    return Placeholders(shown, originals, names)


def full_state_dict(
    state: Mapping[str, Any], param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], ready: UnshardedUnits
) -> dict[str, Any]:
    """Return copies of a module's whole parameters and of all else in its state. One-sided.

    Args:
        state: By the module's names, with placeholders.
        param_infos: Of the sharded parameters.
        units: That hold these.
        ready: Fetches the units.
    """
    placed = {place.full_name: place.name for place in param_infos}
    copies = {name: copy.deepcopy(value) for name, value in state.items() if name not in placed}
    for unit in units:
        ready.unshard(unit)
        whole = {name: unit.parameter(name).clone() for name in unit.ranges}
        copies |= {full_name: whole[name] for full_name, name in placed.items() if name in whole}
    return copies


def wrap_forward(
    module: nn.Module, unit: Unit, calls: UnitForwards, saved: SavedTensorHooks, checkpointing: bool
) -> None:
    """Make every forward of a unit's module one call of the unit."""
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with calls.run(unit):
            output = forward(*args, **kwargs)
        calls.register_backward_hook_for(unit, output)
        return output

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # The arguments stay in the closure: given to `checkpoint`, they would come back as tensors of their own,
            # and attention whose query, key and value are one tensor would take another way than in the forward.
            return checkpoint(functools.partial(call, *args, **kwargs), use_reentrant=False)
        return call(*args, **kwargs)

    inner = recomputed if checkpointing and not unit.is_root else call

    @functools.wraps(forward)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if calls.suspended:
            return forward(*args, **kwargs)
        with saved.active():
            return inner(*args, **kwargs)

    module.forward = outermost


def _refresh_flat_weights(module: nn.RNNBase) -> None:
    """Let an RNN, which keeps its weights in a list of its own, look them up at each call instead."""
    forward = module.forward
    module._flat_weights = []

    @functools.wraps(forward)
    def looked_up(*args: Any, **kwargs: Any) -> Any:
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        try:
            return forward(*args, **kwargs)
        finally:
            module._flat_weights = []

    module.forward = looked_up
