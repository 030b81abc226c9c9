"""Options that several commands share, and functions that parse the values of options."""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from odc_mpi.errors import UserError
from odc_mpi.formatting import parse_size
from odc_mpi.models.attention_names import SUPPORTED, unsupported_reason
from odc_mpi.simulate.options import CACHES, SCENARIO, Option

if TYPE_CHECKING:
    from odc_mpi.simulate.scenario import Scenario

    ScenarioT = TypeVar("ScenarioT", bound=Scenario)

#: Larger counts and seconds are typos, and not every system call accepts them.
MAX_VALUE = 10**9
BASE_HELP = "for adapters: directory or hub name of their base model; default: its directory in the training run"


def add_out(parser: argparse.ArgumentParser, inputs: str, metavar: str, help_text: str) -> None:
    """Add the option --out of a command that requires it. `check_out` checks it."""
    parser.usage = f"{parser.prog} {inputs} --out {metavar} [options]"
    parser.add_argument("--out", type=Path, metavar=metavar, default=Path(), help=help_text)


def check_out(arguments: argparse.Namespace, rest: Sequence[str], words: Sequence[str]) -> None:
    """Raise a UserError if `prepare` or `export` has no --out. The error has the user's words with --out.

    Args:
        rest: Words that the parser did not recognize.
        words: All words of the command line after `odc-mpi`.
    """
    is_prepare, new = arguments.command == "prepare", list(words)
    if getattr(arguments, "out", None) != Path() or not (is_prepare or arguments.command in ("checkpoint", "export")):
        return
    value = "FILE" if is_prepare else "NEW_DIR"
    last = (rest or getattr(arguments, "sources", ())[1:] or [""])[-1]
    if last.startswith("-"):
        return  # an unknown option
    if last and (not is_prepare or Path(last).suffix in (".h5", ".hdf5")):  # meant as the output
        new.insert(len(new) - 1 - new[::-1].index(last), "--out")
    else:
        new += [value] if new[-1] == "--out" else ["--out", value]
    raise UserError(f"expected the option --out {value}, got none: write odc-mpi {shlex.join(new)}")


def require_config(arguments: argparse.Namespace) -> None:
    """Raise a UserError if the file CONFIG of a command does not exist."""
    if not arguments.config.exists():
        raise UserError(
            f"{arguments.config}: expected a configuration file, but there is no such file. CONFIG comes first: "
            f"odc-mpi {arguments.command} CONFIG --run.steps 5"
        )


def positive_int(text: str) -> int:
    """Parse an integer from 1 to `MAX_VALUE`."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= MAX_VALUE):
        raise argparse.ArgumentTypeError(f"expected an integer above 0, at most {MAX_VALUE:,}, got {text!r}")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Parse a size such as 512M and return it in bytes."""
    num_bytes = parse_size(text)
    if num_bytes is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 0, got {text!r}")
    return num_bytes


def attention_name(text: str) -> str:
    """Parse the name of a supported attention implementation."""
    if text not in SUPPORTED:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(SUPPORTED)}, got {text!r}{unsupported_reason(text)}")
    return text


def step_seconds(text: str) -> float:
    """Parse the duration of a step, from 0.001 to 3600 seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 3600:  # nan fails both comparisons
        raise argparse.ArgumentTypeError(f"expected seconds from 0.001 to 3600, got {text!r}")
    return seconds


def add_scenario(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of a simulated scenario. `defaults` replaces defaults of `SCENARIO`, by field name."""
    for field, option in SCENARIO.items():
        add_option(parser, field, option._replace(default=defaults.get(field, option.default)))
    for field, option in CACHES.items():
        add_option(parser, field, option, type=size_in_bytes, metavar="SIZE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_option(parser: argparse.ArgumentParser, field: str, option: Option, **other: Any) -> None:
    """Add an option whose value becomes attribute `field`. `other` overrides arguments of `add_argument`."""
    kind = type(option.default)
    arguments = {
        "type": kind,
        "default": option.default,
        "metavar": "N" if kind is int else "X",
        "help": f"{option.help}; default: {option.default:g}",
    }
    parser.add_argument(option.name, dest=field, **(arguments | other))


def build_scenario(arguments: argparse.Namespace, kind: "type[ScenarioT]") -> "ScenarioT":
    """Create a scenario of class `kind` from the parsed options."""
    from odc_mpi.simulate.scenario import REFERENCE_COST

    names = {field.name for field in fields(kind)}
    values = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    scenario = kind(**values, cost=replace(REFERENCE_COST, constant=arguments.overhead_s))
    scenario.length_distribution  # noqa: B018 - an unknown name fails here, before ranks are started
    return scenario


def utf8(text: str) -> str:
    """Decode an argument as UTF-8, even if the locale has another encoding."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {text!r}: {error.reason}") from None
