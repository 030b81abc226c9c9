"""Partition of a module's parameters into units.

The user selects submodules by class, class name or instance. A unit contains the parameters of one selected submodule,
except for those in units nested inside it. The root unit contains all others, including those shared by several units.
The root is fetched first and stays unsharded for the whole minibatch, so a shared parameter is fetched once.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.units.unit import Unit

#: Selector for units: a class, a class name or a submodule.
UnitChoice = type | str | nn.Module
#: Dotted names of each module's parameters, by their keys in `module._parameters`. Tied keys have the same name.
NamesByModule = dict[nn.Module, dict[str, str]]
#: Parameters of each unit by dotted name, in module order, keyed by the unit's dotted name ("" for the root). A tied
#: parameter is included once, under its first dotted name.
ParametersByUnit = dict[str, dict[str, nn.Parameter]]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return True for floating-point parameters, and for frozen bytes (uint8), such as quantized weights."""
    return parameter.is_floating_point() or (parameter.dtype is torch.uint8 and not parameter.requires_grad)


def partition(
    module: nn.Module, units: Iterable[UnitChoice] | None
) -> tuple[ParametersByUnit, NamesByModule, dict[str, str]]:
    """Divide the parameters of a module that are sharded (`is_sharded`) into units.

    Args:
        units: Classes, class names or instances of submodules. None selects the classes in `module._no_split_modules`.

    Returns:
        Three values: the parameters of each nonempty unit, root first and the others in module order; the names of the
        parameters by module; and a dict that maps every dotted name of a parameter to its first dotted name. A
        parameter has several names if it is tied or its module is shared.

    Raises:
        ValueError: An entry in `units` matches no submodule, or matches one without a `forward` method.
    """
    unit_names = _select_modules(module, units)
    names_by_module: NamesByModule = {}
    names: dict[str, str] = {}
    unit_of: dict[nn.Parameter, str] = {}
    first_names: dict[nn.Parameter, str] = {}
    innermost: dict[str, str] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        parent = innermost.get(prefix.rpartition(".")[0], "")
        unit_name = innermost[prefix] = unit_names.get(submodule, parent)
        for key, parameter in submodule._parameters.items():
            if parameter is None or not is_sharded(parameter):
                continue
            full_name = f"{prefix}.{key}" if prefix else key
            name = first_names.setdefault(parameter, full_name)
            names_by_module.setdefault(submodule, {})[key] = names[full_name] = name
            # A parameter that several units share belongs to the root.
            unit_of[parameter] = unit_name if unit_of.get(parameter, unit_name) == unit_name else ""
    parameters_by_unit: ParametersByUnit = {name: {} for name in ("", *unit_names.values())}
    for parameter, name in first_names.items():
        parameters_by_unit[unit_of[parameter]][name] = parameter
    return {unit_name: part for unit_name, part in parameters_by_unit.items() if part}, names_by_module, names


def check_shardable(module: nn.Module, *, has_weights: bool) -> None:
    """Raise ValueError if a module cannot be sharded.

    The module must not contain trainable parameters that are not real floating-point, embeddings with `max_norm`, or,
    if `has_weights` is False, parameters on the meta device.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: expected trainable parameters to be real floating-point")
    for name, submodule in module.named_modules():
        if getattr(submodule, "max_norm", None) is not None and isinstance(submodule, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"{name}: expected no max_norm, because the weights that it changes are copies of the shards"
            )
    missing = next((name for name, p in module.named_parameters() if is_sharded(p) and p.is_meta), None)
    if missing and not has_weights:
        raise ValueError(f"{missing} is on the meta device: expected `weights` to read initial values from, got None")


def describe_tensors(
    module: nn.Module, parameters_by_unit: ParametersByUnit, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype
) -> str:
    """Return a description of all tensors in a module, one per line, for comparing models between ranks.

    `dtypes` maps dotted names of parameters to their dtypes in the shards, if these differ from `dtype`.
    """
    lines = []
    for unit_name, part in parameters_by_unit.items():
        for name, parameter in part.items():
            kind = "trainable" if parameter.requires_grad else "frozen"
            where = f"{kind} in unit {unit_name or '(root)'}"
            lines.append(f"{name} {tuple(parameter.shape)} {dtypes.get(name, dtype)} {where}")
    lines += [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in replicated_tensors(module)]
    return "\n".join(lines).replace("torch.", "")


def make_units(
    parameters_by_unit: ParametersByUnit,
    num_owners: int,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype,
    num_islands: int = 1,
    node_ranks: tuple[int, ...] | None = None,
) -> tuple[list[Unit], list[FlatLayout]]:
    """Create units and layouts of their flat arrays, divided among `num_owners` ranks on `num_islands` islands.

    With `node_ranks`, the ranks of this node, the frozen arrays are divided among these alone.

    A unit has an array for its trainable parameters of each dtype, and one for all frozen ones: of bytes if their
    dtypes differ.
    `dtypes` contains, by dotted name, the dtypes that differ from `dtype`, that of the parameter store.
    """
    units: list[Unit] = []
    layouts: list[FlatLayout] = []
    for unit_name, part in parameters_by_unit.items():
        arrays: dict[tuple[bool, str], list[ParameterSpec]] = {}
        mixed = len({dtypes.get(name) for name, parameter in part.items() if not parameter.requires_grad}) > 1
        for name, parameter in part.items():
            is_frozen = not parameter.requires_grad
            stored = dtypes.get(name, dtype if is_frozen and mixed else None)
            spec = ParameterSpec(name, tuple(parameter.shape), parameter.requires_grad, stored)
            arrays.setdefault((is_frozen, "" if is_frozen else str(stored)), []).append(spec)
        first = len(layouts)
        for (is_frozen, _), specs in sorted(arrays.items()):
            owners = node_ranks if is_frozen else None
            layouts.append(FlatLayout.build(unit_name or "(root)", specs, num_owners, num_islands, owners))
        units.append(Unit(unit_name, layouts[first:], range(first, len(layouts))))
    return units, layouts


def _select_modules(module: nn.Module, units: Iterable[UnitChoice] | None) -> dict[nn.Module, str]:
    """Return the selected submodules with their dotted names, in module order."""
    if units is None:
        units = sorted(getattr(module, "_no_split_modules", None) or ())
        # A model family's list can contain classes that this model does not use.
        present = {type(submodule).__name__ for submodule in module.modules()}
        units = [name for name in units if name in present]
    chosen: dict[nn.Module, str] = {}
    for choice in units:
        kinds = choice if isinstance(choice, type) else ()
        matches = {
            m: name
            for name, m in module.named_modules()
            if name and (m is choice or type(m).__name__ == choice or isinstance(m, kinds))
        }
        if not matches:
            raise ValueError(
                f"units: expected classes or submodules of {type(module).__name__}, no submodule is {choice!r}"
            )
        chosen |= matches
    for unit, name in chosen.items():
        if type(unit).forward is nn.Module.forward:
            raise ValueError(
                f"units: {name} is a {type(unit).__name__}, which is never called itself; name the modules inside it"
            )
    return {m: name for name, m in module.named_modules() if m in chosen}


def replicated_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dotted name and value of each tensor that is not sharded: buffers and most integer parameters."""
    yield from module.named_buffers()
    yield from ((name, p) for name, p in module.named_parameters() if not is_sharded(p))


def replicated_persistent_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dotted name and value of each tensor that is not sharded, except for non-persistent buffers."""
    non_persistent = {
        f"{name}.{key}" if name else key
        for name, submodule in module.named_modules()
        for key in submodule._non_persistent_buffers_set
    }
    yield from ((name, tensor) for name, tensor in replicated_tensors(module) if name not in non_persistent)
