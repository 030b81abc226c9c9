"""Which parameters of a module form which unit.

A unit is a submodule that the user names (by class, by class name or itself), with all parameters below it that no unit
further down takes. What is left belongs to the root unit, and so does a parameter that several units share: the root is
fetched first and stays for the whole minibatch, so that a shared parameter is fetched once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from odc_mpi.shard.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.units.unit import Unit

#: How a user may name units.
UnitChoice = type | str | nn.Module


@dataclass
class UnitParameters:
    """The parameters of one unit.

    Attributes:
        name: Dotted name of the unit's module, "" for the root.
        parameters: By dotted name, in the module's order; a tied parameter under its first name only.
    """

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def specs(self, dtypes: Mapping[str, torch.dtype]) -> list[list[ParameterSpec]]:
        """Describe the parameters: the trainable first, then the frozen, those of each type apart.

        Args:
            dtypes: Types of parameters that are not of the type of the parameter store, by name.
        """
        kinds: dict[tuple[bool, str], list[ParameterSpec]] = {}
        for name, parameter in self.parameters.items():
            spec = ParameterSpec(name, tuple(parameter.shape), parameter.requires_grad, dtypes.get(name))
            kinds.setdefault((not spec.requires_grad, str(spec.dtype)), []).append(spec)
        return [kinds[kind] for kind in sorted(kinds)]


@dataclass(frozen=True)
class ParamModuleInfo:
    """Where a parameter hangs: `module._parameters[key]`, known by its first dotted name."""

    module: nn.Module
    key: str
    name: str
    full_name: str


def names_by_module(param_infos: Iterable[ParamModuleInfo]) -> dict[nn.Module, dict[str, str]]:
    """Return the names of the parameters that hang in each module, by their keys there."""
    names: dict[nn.Module, dict[str, str]] = {}
    for place in param_infos:
        names.setdefault(place.module, {})[place.key] = place.name
    return names


def partition(
    module: nn.Module, units: Iterable[UnitChoice] | None
) -> tuple[list[UnitParameters], list[ParamModuleInfo]]:
    """Divide a module's floating-point parameters into units.

    Args:
        module: Any module.
        units: Classes, class names or submodules; by default the module's `_no_split_modules`.

    Returns:
        The units that have parameters, the root first and then in the module's order, and all places where those hang,
        the second names of tied parameters and of shared modules included.

    Raises:
        ValueError: A choice matches no submodule, or a module that is never called.
    """
    chosen = _select_modules(module, units)
    places: list[ParamModuleInfo] = []
    holders: dict[nn.Parameter, str] = {}
    first_names: dict[nn.Parameter, str] = {}
    for owner, prefix, submodule in _walk(module, {unit: name for name, unit in chosen.items()}):
        for key, parameter in submodule._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            full_name = f"{prefix}.{key}" if prefix else key
            name = first_names.setdefault(parameter, full_name)
            places.append(ParamModuleInfo(submodule, key, name, full_name))
            # Met in a second unit: it goes to the root.
            holders[parameter] = owner if holders.get(parameter, owner) == owner else ""
    result = {name: UnitParameters(name) for name in ("", *chosen)}
    for parameter, name in first_names.items():
        result[holders[parameter]].parameters[name] = parameter
    return [unit for unit in result.values() if unit.parameters], places


def check_shardable(module: nn.Module, parts: Iterable[UnitParameters], *, has_weights: bool) -> None:
    """Refuse a module that cannot be trained as shards.

    Args:
        module: The module.
        parts: Its units.
        has_weights: Whether initial values come from elsewhere.

    Raises:
        ValueError: See `shard.model.ShardedModel`.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: expected trainable parameters to be real floating-point")
    for name, submodule in module.named_modules():
        if getattr(submodule, "max_norm", None) is not None and isinstance(submodule, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"{name} has max_norm, which changes weights in the forward: that of a copy would be lost")
    missing = next((name for part in parts for name, p in part.parameters.items() if p.is_meta), None)
    if missing and not has_weights:
        raise ValueError(f"{missing} is on the meta device: expected `weights` to read initial values from, got None")


def make_units(
    parts: Iterable[UnitParameters], num_owners: int, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[Unit], list[FlatLayout]]:
    """Give every unit a flat array for its trainable parameters and one for the frozen, for each type.

    Args:
        parts: The units.
        num_owners: Ranks that own a shard of each array.
        dtypes: As `UnitParameters.specs` takes them.
    """
    units: list[Unit] = []
    layouts: list[FlatLayout] = []
    for part in parts:
        own = [FlatLayout.build(part.name or "(root)", specs, num_owners) for specs in part.specs(dtypes)]
        units.append(Unit(part.name, own, range(len(layouts), len(layouts) + len(own))))
        layouts += own
    return units, layouts


def _select_modules(module: nn.Module, units: Iterable[UnitChoice] | None) -> dict[str, nn.Module]:
    """Find the submodules that the choices name, by dotted name."""
    if units is None:
        units = sorted(getattr(module, "_no_split_modules", None) or ())
        # A family's list may name classes that this model does not use.
        present = {type(submodule).__name__ for submodule in module.modules()}
        units = [name for name in units if name in present]
    chosen: dict[str, nn.Module] = {}
    for choice in units:
        found = {name: m for name, m in module.named_modules() if name and _matches(m, choice)}
        if not found:
            raise ValueError(
                f"units: expected classes or submodules of {type(module).__name__}, no submodule is {choice!r}"
            )
        chosen |= found
    for name, unit in chosen.items():
        if type(unit).forward is nn.Module.forward:
            raise ValueError(
                f"units: {name} is a {type(unit).__name__}, which is never called itself; name the modules inside it"
            )
    return {name: chosen[name] for name, _ in module.named_modules() if name in chosen}


def _matches(module: nn.Module, choice: UnitChoice) -> bool:
    if isinstance(choice, nn.Module):
        return module is choice
    if isinstance(choice, str):
        return type(module).__name__ == choice
    return isinstance(module, choice)


def _walk(
    module: nn.Module, unit_names: dict[nn.Module, str], name: str = "", unit: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every submodule with the innermost unit around it ("" for the root) and its own name, under each it has."""
    unit = unit_names.get(module, unit)
    yield unit, name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, unit_names, f"{name}.{key}" if name else key, unit)


def replicated_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is not sharded, buffers and parameters that are not floating-point, by dotted name."""
    yield from module.named_buffers()
    yield from ((name, p) for name, p in module.named_parameters() if not p.is_floating_point())


def replicated_persistent_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what of `replicated_tensors` belongs into a checkpoint: without buffers that are made anew."""
    passing = {
        f"{name}.{key}" if name else key
        for name, submodule in module.named_modules()
        for key in submodule._non_persistent_buffers_set
    }
    yield from ((name, tensor) for name, tensor in replicated_tensors(module) if name not in passing)
