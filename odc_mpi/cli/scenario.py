"""The options that a scenario is made of, of `odc-mpi simulate` and `odc-mpi bench schedule`."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from odc_mpi.cli.options import size
from odc_mpi.errors import UserError

if TYPE_CHECKING:
    from odc_mpi.simulate.rollouts import Rollouts
    from odc_mpi.simulate.scenario import Scenario

#: What a scenario is made of, besides lengths, ranks and tickets, with the defaults of `simulate`.
SCENARIO: tuple[tuple[str, int | float, str], ...] = (
    ("--per-rank", 8, "sequences per rank and minibatch"),
    ("--minibatches", 30, "how many are drawn"),
    ("--seed", 0, "everything follows from it"),
    ("--packing-ratio", 1.0, "most tokens in a microbatch, in longest sequences"),
    ("--speed-variation", 0.0, "standard deviation of a rank's speed, of mean 1"),
    ("--cost-error", 0.0, "standard deviation of a sequence's time to its cost"),
    ("--overhead-s", 0.0, "seconds of a microbatch besides its sequences"),
    ("--units", 28, "units of the model"),
    ("--unit-bytes", 0, "bytes of a unit; 0: of a model of 1.5 B parameters in bf16, by its units"),
    ("--fetch-gb-per-s", 0.0, "of a unit; 0 is free"),
    ("--push-gb-per-s", 0.0, "of a unit; 0 is free"),
    ("--piece-factor", 1.08, "what a piece of a sequence takes, to its part of the whole"),
    ("--kv-gb-per-s", 0.0, "of the keys and values of other pieces; 0 is free"),
)
#: What generation is made of.
GENERATION: tuple[tuple[str, type, str], ...] = (
    ("--completions", int, "completions of a prompt, of which each rank has --per-rank; default: 8"),
    ("--decode-step-s", float, "seconds of a decode step, besides its sequences; default: 0.002"),
    ("--decode-sequence-s", float, "seconds of each sequence in a decode step; default: 8.6e-05"),
)
#: Ranks of a scenario, unless mpiexec says how many.
RANKS = 8


def add_scenario(parser: argparse.ArgumentParser, defaults: Mapping[str, tuple[int, int]]) -> None:
    """Add the options. Local.

    Args:
        parser: Of a command.
        defaults: Where they are other than those of `SCENARIO`: of either workload, for `fill_in`.
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
    for option, kind, meaning in GENERATION:
        metavar = "N" if kind is int else "X"
        parser.add_argument(option, type=kind, metavar=metavar, help=f"of --workload grpo: {meaning}")
    for option, usual, meaning in SCENARIO:
        kind = type(usual)
        metavar = "N" if kind is int else "X"
        if option in defaults:
            told, default = of_workloads(*defaults[option]), None
        else:
            told, default = f"{usual:g}", usual
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=f"{meaning}; default: {told}")
    for what in ("parameter", "gradient"):
        meaning = f"over windows: as comm.{what}_cache_bytes; default: 0"
        parser.add_argument(f"--{what}-cache-bytes", type=size, default=0, metavar="SIZE", help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def of_workloads(sft: float, grpo: float) -> str:
    """Return the words for two defaults. Local."""
    return f"{sft:g}, of grpo: {grpo:g}"


def fill_in(arguments: argparse.Namespace, defaults: Mapping[str, tuple[float, float]]) -> None:
    """Set options that were not given to the defaults of the workload. Local."""
    for option, (sft, grpo) in defaults.items():
        name = option[2:].replace("-", "_")
        if getattr(arguments, name) is None:
            setattr(arguments, name, grpo if arguments.workload == "grpo" else sft)


def rollouts_of(arguments: argparse.Namespace) -> "Rollouts":
    """Return the rollouts that the options of `--workload grpo` tell of. Local."""
    from odc_mpi.simulate.rollouts import Rollouts

    arguments.lengths = arguments.lengths or "aime"
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: value for name, value in given.items() if name in Rollouts.__dataclass_fields__}
    return Rollouts(_scenario_of(arguments), **settings)


def scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options of `--workload sft` tell of. Local.

    Raises:
        UserError: An option is of generation.
    """
    for option, _, _ in GENERATION:
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise UserError(f"{option}: expected --workload grpo, too, got {arguments.workload}")
    return _scenario_of(arguments)


def _scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options tell of, those of `simulate`, too. Local."""
    from odc_mpi.simulate.scenario import REFERENCE_COST, Scenario

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: value for name, value in given.items() if name in Scenario.__dataclass_fields__}
    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**settings, num_minibatches=arguments.minibatches, num_units=arguments.units, cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario
