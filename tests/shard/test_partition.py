import pytest
import torch
from torch import nn
from toy_models import Block, Layer, Stack, Transformer

from odc_mpi.shard.partition import UnitChoice, make_units, partition, replicated_tensors


def names(module: nn.Module, units: list[UnitChoice] | None = None) -> dict[str, list[str]]:
    """The parameters of every unit, by dotted name."""
    return {name: list(parameters) for name, parameters in partition(module, units)[0].items()}


class Pair(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Special(Layer):
    pass


LAYER, STACK, BLOCKS = Layer(3), Stack(3), Transformer(2)


@pytest.mark.parametrize(
    ("module", "units", "expected"),
    [
        # By default the blocks of `_no_split_modules`.
        (BLOCKS, None, ["", "blocks.0", "blocks.1"]),
        (BLOCKS, [Block], ["", "blocks.0", "blocks.1"]),
        (BLOCKS, ["Block"], ["", "blocks.0", "blocks.1"]),
        (BLOCKS, [BLOCKS.blocks[1], BLOCKS.blocks[0]], ["", "blocks.0", "blocks.1"]),
        (BLOCKS, ["Block", Block, BLOCKS.blocks[0]], ["", "blocks.0", "blocks.1"]),
        (BLOCKS, [BLOCKS.blocks[1]], ["", "blocks.1"]),
        (BLOCKS, [], [""]),
        (STACK, None, [""]),
        (STACK, [STACK.last, STACK.layers[2], STACK.layers[0]], ["", "layers.0", "layers.2", "last"]),
        # A class selects its subclasses, a name does not.
        (Pair(Special(), Layer()), [Layer], ["a", "b"]),
        (Pair(Special(), Layer()), ["Layer"], ["", "b"]),
        # Modules without parameters are no units, and a module under two names is one.
        (BLOCKS, [nn.GELU, Block], ["", "blocks.0", "blocks.1"]),
        (Pair(LAYER, LAYER), [Layer], ["a"]),
    ],
)
def test_units_in_the_order_of_the_module(
    module: nn.Module, units: list[UnitChoice] | None, expected: list[str]
) -> None:
    assert list(names(module, units)) == expected


@pytest.mark.parametrize("choice", ["Blok", nn.Conv2d, nn.Linear(1, 1), Transformer], ids=str)
def test_a_choice_that_matches_nothing(choice: UnitChoice) -> None:
    with pytest.raises(ValueError, match="units: expected classes or submodules of Transformer"):
        partition(Transformer(1), [choice])


@pytest.mark.parametrize("choice", [nn.ModuleList, "ModuleList"])
def test_a_module_that_is_never_called(choice: UnitChoice) -> None:
    with pytest.raises(ValueError, match="blocks is a ModuleList, which is never called itself"):
        partition(Transformer(1), [choice])


def test_tied_across_units_goes_to_the_root() -> None:
    module = Pair(Layer(3), Layer(3))
    module.b.linear.weight = module.a.linear.weight
    assert names(module, [Layer]) == {"": ["a.linear.weight"], "a": ["a.linear.bias"], "b": ["b.linear.bias"]}


def test_tensors_without_floating_point_do_not_change() -> None:
    module = Layer(3)
    module.steps = nn.Parameter(torch.tensor(3), requires_grad=False)
    module.register_buffer("scale", torch.ones(2))
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    module.register_parameter("absent", None)
    assert names(module) == {"": ["linear.weight", "linear.bias"]}
    assert sorted(name for name, _ in replicated_tensors(module)) == ["scale", "scratch", "steps"]


def test_arrays_hold_trainable_or_frozen_parameters_of_one_dtype() -> None:
    module = nn.Sequential(Layer(3), Layer(3))
    module[0].linear.bias.requires_grad_(False)
    (unit,), layouts = make_units(partition(module, None)[0], 1, {"1.linear.bias": torch.bfloat16}, torch.float32)
    names = [[range_.spec.name for range_ in layout.ranges] for layout in layouts]
    assert names == [["0.linear.weight", "1.linear.weight"], ["1.linear.bias"], ["0.linear.bias"]]
    assert [layout.trainable for layout in layouts] == [True, True, False]
    assert [layout.dtype for layout in layouts] == [None, torch.bfloat16, None]
    assert unit.layouts == tuple(layouts)
