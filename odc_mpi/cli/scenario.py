"""The options that a scenario is made of, of `odc-mpi simulate` and `odc-mpi bench schedule`."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from odc_mpi.cli.options import size

if TYPE_CHECKING:
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
#: Ranks of a scenario, unless mpiexec says how many.
RANKS = 8


def add_scenario(parser: argparse.ArgumentParser, defaults: Mapping[str, int]) -> None:
    """Add the options. Local.

    Args:
        parser: Of a command.
        defaults: Where they are other than those of `SCENARIO`.
    """
    parser.add_argument(
        "--lengths",
        default="longalign",
        metavar="NAME",
        help="longalign, swesmith, aime, equal or the path of a data set; default: longalign",
    )
    for option, usual, meaning in SCENARIO:
        kind, default = type(usual), defaults.get(option, usual)
        metavar = "N" if kind is int else "X"
        parser.add_argument(
            option, type=kind, default=default, metavar=metavar, help=f"{meaning}; default: {default:g}"
        )
    for what in ("parameter", "gradient"):
        meaning = f"over windows: as comm.{what}_cache_bytes; default: 0"
        parser.add_argument(f"--{what}-cache-bytes", type=size, default=0, metavar="SIZE", help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options tell of, those of `simulate`, too. Local."""
    from odc_mpi.simulate.scenario import REFERENCE_COST, Scenario

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: value for name, value in given.items() if name in Scenario.__dataclass_fields__}
    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**settings, num_minibatches=arguments.minibatches, num_units=arguments.units, cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario
