"""Modifications to a sharded module: on-demand parameters, tracked forward passes, and placeholders with checks."""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from odc_mpi.comm.transport import Transport
from odc_mpi.shard.autograd import UnitForwards
from odc_mpi.shard.partition import NamesByModule, replicated_tensors
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits


class OnDemandParameters(dict[str, Any]):
    """Replacement for a module's `_parameters` dict that fetches a sharded parameter when it is looked up.

    Iteration, as in `module.parameters()`, yields placeholders and fetches nothing.

    Args:
        find: Function that returns the full parameter for a given dotted name.
        names: Dotted names of the sharded parameters, by their keys in this dict.
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


def check_not_sharded(module: nn.Module) -> None:
    """Raise ValueError if a module or any of its submodules has been sharded before, even if the model was closed."""
    for name, submodule in module.named_modules():
        if isinstance(submodule._parameters, OnDemandParameters):
            what = name or type(module).__name__
            raise ValueError(f"{what} was sharded before and no longer has its parameters: build a new module")


class Placeholders:
    """Placeholders for sharded parameters, filled with NaN (bytes: 0), which are neither to be optimized nor saved.

    Construction replaces the `_parameters` of all modules in `names` with `OnDemandParameters`, and makes their
    `state_dict()` raise RuntimeError. The original parameters must not be optimized either, and are not kept alive.
    """

    def __init__(self, names: NamesByModule, transport: Transport, forwards: UnitForwards) -> None:
        unit_of = {name: unit for unit in forwards.unsharded.units for name in unit.ranges}
        self._can_be_saved = False
        self._tensors: dict[str, nn.Parameter] = {}
        self._trained: dict[str, bool] = {}
        self._by_id: dict[int, tuple[str, weakref.ref[nn.Parameter]]] = {}

        def find(name: str) -> torch.Tensor:
            return forwards.parameter(unit_of[name], name)

        for submodule, keys in names.items():
            submodule.register_state_dict_pre_hook(self._check_saved)
            for key, name in keys.items():
                if name in self._tensors:
                    continue  # tied parameters share a placeholder, just as they shared a parameter
                original, unit = cast(nn.Parameter, submodule._parameters[key]), unit_of[name]
                i, range_ = unit.ranges[name]
                dtype = range_.spec.dtype or transport.parameters.dtype_of(unit.indices[i])
                value = torch.nan if dtype.is_floating_point else 0
                # Expanded, so that it takes the memory of a single element.
                filled = torch.full((), value, dtype=dtype, device=transport.device).expand(original.shape)
                self._tensors[name] = nn.Parameter(filled, requires_grad=original.requires_grad)
                self._trained[name] = original.requires_grad
                for parameter in (original, self._tensors[name]):
                    self._by_id[id(parameter)] = name, weakref.ref(parameter)
            items = {key: self._tensors[keys[key]] if key in keys else p for key, p in submodule._parameters.items()}
            submodule.__dict__["_parameters"] = OnDemandParameters(items, find, keys)
            if isinstance(submodule, nn.RNNBase):
                _refresh_flat_weights(submodule)

    @contextmanager
    def allow_state_dict(self) -> Iterator[None]:
        """Context manager in whose block the modules' `state_dict()` is allowed."""
        self._can_be_saved = True
        try:
            yield
        finally:
            self._can_be_saved = False

    def check_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if any of an optimizer's `parameters` is a placeholder or has been replaced by one."""
        for parameter in parameters:
            if id(parameter) not in self._by_id:
                continue
            name, reference = self._by_id[id(parameter)]
            if reference() is parameter:  # an address can be reused
                raise RuntimeError(
                    f"an optimizer was given {name} of the module, which training does not change: give the optimizer "
                    "model.shard_parameters()"
                )

    def check_frozen(self) -> None:
        """Raise RuntimeError if the `requires_grad` of any placeholder has changed since sharding."""
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
    """Overwrite a module's buffers and integer parameters on all ranks with those of rank 0. Collective.

    The tensors are moved to the transport's device. Tensors on the meta device are skipped.
    """
    for _, tensor in replicated_tensors(module):
        if not tensor.is_meta:
            value = tensor.detach().contiguous().cpu()
            transport.group.broadcast(value)
            if tensor.device != transport.device:
                # In place, as in `nn.Module.to`, because the tensor may be referenced elsewhere.
                tensor.data = tensor.data.to(transport.device)
            tensor.detach().copy_(value)


@contextmanager
def materialized_parameters(names: NamesByModule, unsharded: UnshardedUnits) -> Iterator[None]:
    """Context manager that installs full parameters without gradients in the modules. One-sided.

    Units that are not unsharded are fetched first. Forward passes are then as fast as those of an unsharded module.
    They avoid on-demand parameter lookups, each of which costs microseconds of Python time. This matters in decoding.

    All units together must fit into the cache, or be views that stay valid. In the enclosed code, units must not be
    resharded, and forward passes are not tracked. Nested calls have no effect.
    """
    if unsharded.reshard_forbidden:
        yield
        return
    full: dict[str, nn.Parameter] = {}
    with torch.inference_mode(False):  # code outside inference mode could not use inference tensors
        for unit in unsharded.units:
            unsharded.unshard(unit)
            full |= {name: nn.Parameter(unit.parameter(name), requires_grad=False) for name in unit.ranges}
    with ExitStack() as restored:
        restored.callback(setattr, unsharded, "reshard_forbidden", False)
        unsharded.reshard_forbidden = True
        for module, keys in names.items():
            on_demand = module._parameters
            restored.callback(module.__dict__.__setitem__, "_parameters", on_demand)
            materialized = {key: full[keys[key]] if key in keys else other for key, other in on_demand.items()}
            module.__dict__["_parameters"] = materialized
        yield
    unsharded.check_unchanged()


def full_state_dict(state: Mapping[str, Any], names: Mapping[str, str], unsharded: UnshardedUnits) -> dict[str, Any]:
    """Return a copy of the state dict `state`, with full parameters in place of placeholders. One-sided.

    `names` maps every dotted name of a parameter to its first dotted name. Tied parameters have several names.
    """
    copies = {name: copy.deepcopy(value) for name, value in state.items() if name not in names}
    for unit in unsharded.units:
        unsharded.unshard(unit)
        full = {name: unit.parameter(name).clone() for name in unit.ranges}
        copies |= {full_name: full[name] for full_name, name in names.items() if name in full}
    return copies


def wrap_forward(module: nn.Module, unit: Unit, forwards: UnitForwards, checkpointing: bool) -> None:
    """Make the forward pass of a unit's module run within `UnitForwards.run`.

    If `checkpointing` is True, also apply activation checkpointing, except to the root unit.
    """
    forward = module.forward

    def tracked(runs: Iterator[int], *args: Any, **kwargs: Any) -> Any:
        with forwards.run(unit, is_recomputation=next(runs) > 0):
            output = forward(*args, **kwargs)
        forwards.register_backward_hook_for(unit, output)
        return output

    @functools.wraps(forward)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if forwards.unsharded.reshard_forbidden:
            return forward(*args, **kwargs)
        with forwards.saved_tensor_hooks.active():
            if checkpointing and not unit.is_root and torch.is_grad_enabled():
                # The arguments are in a closure. As arguments of `checkpoint`, each would become a different tensor,
                # and attention whose query, key and value are the same tensor would take a different code path.
                return checkpoint(functools.partial(tracked, count(), *args, **kwargs), use_reentrant=False)
            return tracked(count(), *args, **kwargs)

    module.forward = outermost


def _refresh_flat_weights(module: nn.RNNBase) -> None:
    """Make an RNN look up its weights in each forward pass instead of keeping them in `_flat_weights`."""
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
