"""The options that a scenario is made of, of `odc-mpi simulate` and `odc-mpi bench schedule`."""

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from odc_mpi.cli.options import size
from odc_mpi.errors import UserError
from odc_mpi.simulate.options import CACHES, GENERATION, SCENARIO, Option

if TYPE_CHECKING:
    from odc_mpi.simulate.rollouts import Rollouts
    from odc_mpi.simulate.scenario import Scenario


def add_scenario(parser: argparse.ArgumentParser, defaults: Mapping[str, str]) -> None:
    """Add the options. Local.

    Args:
        parser: Of a command.
        defaults: In words, by field, where the command has others than those of `SCENARIO` if they are not given.
    """
    parser.add_argument(
        "--lengths",
        metavar="NAME",
        help="longalign, swesmith, aime, equal or the path of a data set; default: longalign, of grpo: aime",
    )
    parser.add_argument(
        "--workload",
        choices=("sft", "grpo"),
        default="sft",
        help="sft: training; grpo: generation and training in one minibatch; default: sft",
    )
    for field, option in GENERATION.items():
        meaning = f"of --workload grpo: {option.meaning}; default: {option.default:g}"
        add_option(parser, field, option, default=None, help=meaning)
    for field, option in SCENARIO.items():
        if field in defaults:
            add_option(parser, field, option, default=None, help=f"{option.meaning}; default: {defaults[field]}")
        else:
            add_option(parser, field, option)
    for field, option in CACHES.items():
        add_option(parser, field, option, type=size, metavar="SIZE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_option(parser: argparse.ArgumentParser, field: str, option: Option, **other: Any) -> None:
    """Add an option, as it says of itself but for what is given otherwise. Local."""
    kind = type(option.default)
    usual = {
        "type": kind,
        "default": option.default,
        "metavar": "N" if kind is int else "X",
        "help": f"{option.meaning}; default: {option.default:g}",
    }
    parser.add_argument(option.name, dest=field, **(usual | other))


def of_workloads(sft: float, grpo: float) -> str:
    """Return the words for two defaults. Local."""
    return f"{sft:g}, of grpo: {grpo:g}"


def fill_in(arguments: argparse.Namespace, defaults: Mapping[str, tuple[float, float]]) -> None:
    """Set options that were not given to the defaults of the workload. Local."""
    for field, (sft, grpo) in defaults.items():
        if getattr(arguments, field) is None:
            setattr(arguments, field, grpo if arguments.workload == "grpo" else sft)


def rollouts_of(arguments: argparse.Namespace) -> "Rollouts":
    """Return the rollouts that the options of `--workload grpo` tell of. Local."""
    from odc_mpi.simulate.rollouts import Rollouts

    arguments.lengths = arguments.lengths or "aime"
    return Rollouts(_scenario_of(arguments), **_given(arguments, Rollouts))


def scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options of `--workload sft` tell of. Local.

    Raises:
        UserError: An option is of generation.
    """
    for field, option in GENERATION.items():
        if getattr(arguments, field) is not None:
            raise UserError(f"{option.name}: expected --workload grpo, too, got {arguments.workload}")
    return _scenario_of(arguments)


def _scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options tell of, those of `simulate`, too. Local."""
    from odc_mpi.simulate.scenario import REFERENCE_COST, Scenario

    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**_given(arguments, Scenario), cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario


def _given(arguments: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Return the options that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}
