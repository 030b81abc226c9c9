"""Options of a scenario, for `odc-mpi simulate` and `odc-mpi bench schedule`."""

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from odc_mpi.cli.options import size_in_bytes
from odc_mpi.simulate.options import CACHES, SCENARIO, Option

if TYPE_CHECKING:
    from odc_mpi.simulate.scenario import Scenario

    ScenarioT = TypeVar("ScenarioT", bound=Scenario)


def add_scenario(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of a scenario; `defaults` replaces defaults of `SCENARIO`."""
    for field, option in SCENARIO.items():
        add_option(parser, field, option._replace(default=defaults.get(field, option.default)))
    for field, option in CACHES.items():
        add_option(parser, field, option, type=size_in_bytes, metavar="SIZE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_option(parser: argparse.ArgumentParser, field: str, option: Option, **other: Any) -> None:
    """Add an option; `other` replaces arguments of `add_argument`."""
    kind = type(option.default)
    arguments = {
        "type": kind,
        "default": option.default,
        "metavar": "N" if kind is int else "X",
        "help": f"{option.help}; default: {option.default:g}",
    }
    parser.add_argument(option.name, dest=field, **(arguments | other))


def build_scenario(arguments: argparse.Namespace, kind: "type[ScenarioT]") -> "ScenarioT":
    """Return the scenario, of class `kind`, that the options describe."""
    from odc_mpi.simulate.scenario import REFERENCE_COST

    names = {field.name for field in fields(kind)}
    values = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    scenario = kind(**values, cost=replace(REFERENCE_COST, constant=arguments.overhead_s))
    scenario.length_distribution  # noqa: B018 - an unknown name fails here, before ranks are started
    return scenario
