"""Changes to the module itself: on-demand parameters, tracked forwards, and checks against misuse of placeholders."""

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
    """The dict `_parameters` of a module, in which the lookup of a sharded parameter fetches it.

    Iteration, as by `module.parameters()`, yields placeholders (`placeholder`).

    Args:
        placeholders: Initial items of the dict, by key.
        find: Returns the parameter of a dotted name.
        names: Dotted name of every sharded parameter, by key.
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
    """Return a parameter with the shape of `parameter` that occupies no memory; all its elements are NaN."""
    nan = torch.full((), float("nan"), dtype=dtype, device=device)
    return nn.Parameter(nan.expand(parameter.shape), requires_grad=parameter.requires_grad)


class Placeholders:
    """Placeholders of a module, and checks that they are neither optimized nor saved.

    Args:
        tensors: Placeholders by dotted name.
        originals: Replaced parameters by dotted name. Only weak references are kept.
        modules: Modules with placeholders, which their `state_dict()` would save.
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
        """Return the placeholders, and those replaced parameters that still exist."""
        originals = [original() for _, original in self._originals.values()]
        return [*self._tensors.values(), *(original for original in originals if original is not None)]

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Allow `state_dict()` of the modules in the enclosed code."""
        self._can_be_saved = True
        try:
            yield
        finally:
            self._can_be_saved = False

    def check_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if placeholders or replaced parameters are among an optimizer's parameters."""
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None and id(parameter) in self._originals:
                original_name, original = self._originals[id(parameter)]
                name = original_name if original() is parameter else None  # an address can be reused
            if name is not None:
                raise RuntimeError(
                    f"an optimizer was given {name} of the module, which training does not change: give the optimizer "
                    "model.shard_parameters()"
                )

    def check_frozen(self) -> None:
        """Raise RuntimeError if `requires_grad` of a parameter has changed since the parameters were sharded."""
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
    """Copy the buffers and integer parameters of rank 0 to the device of every rank. Collective."""
    for _, tensor in replicated_tensors(module):
        if not tensor.is_meta:
            value = tensor.detach().contiguous().cpu()
            transport.group.broadcast(value)
            if tensor.device != transport.device:
                # In place, as by `nn.Module.to`, because the tensor may be referenced elsewhere.
                tensor.data = tensor.data.to(transport.device)
            tensor.detach().copy_(value)


def install_on_demand_parameters(
    param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], transport: Transport, forwards: UnitForwards
) -> Placeholders:
    """Replace the parameters of modules by parameters that are fetched on demand. Return the placeholders."""
    unit_of = {name: unit for unit in units for name in unit.ranges}

    def find(name: str) -> torch.Tensor:
        return forwards.parameter(unit_of[name], name)

    names = names_by_module(param_infos)
    # Tied parameters share one placeholder, as they shared one parameter.
    placeholders: dict[str, nn.Parameter] = {}
    originals: dict[str, nn.Parameter] = {}
    for submodule, keys in names.items():
        for key, name in keys.items():
            if name not in placeholders:
                originals[name] = cast(nn.Parameter, submodule._parameters[key])
                unit = unit_of[name]
                dtype = transport.parameters.dtype_of(unit.indices[unit.ranges[name][0]])
                placeholders[name] = placeholder(originals[name], dtype, transport.device)
        items = {key: placeholders[keys[key]] if key in keys else p for key, p in submodule._parameters.items()}
        submodule.__dict__["_parameters"] = OnDemandParameters(items, find, keys)
        if isinstance(submodule, nn.RNNBase):
            _refresh_flat_weights(submodule)
    return Placeholders(placeholders, originals, names)


def full_state_dict(
    state: Mapping[str, Any], param_infos: Sequence[ParamModuleInfo], units: Sequence[Unit], unsharded: UnshardedUnits
) -> dict[str, Any]:
    """Return a copy of the state dict `state`, with full parameters in place of placeholders. One-sided."""
    names = {info.full_name: info.name for info in param_infos}
    copies = {name: copy.deepcopy(value) for name, value in state.items() if name not in names}
    for unit in units:
        unsharded.unshard(unit)
        full = {name: unit.parameter(name).clone() for name in unit.ranges}
        copies |= {full_name: full[name] for full_name, name in names.items() if name in full}
    return copies


def wrap_forward(
    module: nn.Module, unit: Unit, forwards: UnitForwards, saved: SavedTensorHooks, checkpointing: bool
) -> None:
    """Wrap `forward` of the module of a unit by `UnitForwards.run`, and by activation checkpointing."""
    forward = module.forward

    def tracked(*args: Any, **kwargs: Any) -> Any:
        with forwards.run(unit):
            output = forward(*args, **kwargs)
        forwards.register_backward_hook_for(unit, output)
        return output

    @functools.wraps(forward)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if forwards.suspended:
            return forward(*args, **kwargs)
        with saved.active():
            if checkpointing and not unit.is_root and torch.is_grad_enabled():
                # The arguments are in a closure. As arguments of `checkpoint` each would become a different tensor, and
                # attention whose query, key and value are one tensor would use another kernel than in the forward.
                return checkpoint(functools.partial(tracked, *args, **kwargs), use_reentrant=False)
            return tracked(*args, **kwargs)

    module.forward = outermost


def _refresh_flat_weights(module: nn.RNNBase) -> None:
    """Make an RNN look up its weights at each forward, instead of in the list `_flat_weights`."""
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
