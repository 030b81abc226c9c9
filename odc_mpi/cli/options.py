"""Options shared by several commands. Functions that parse option values raise `argparse.ArgumentTypeError`."""

import argparse
import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from odc_mpi.errors import UserError
from odc_mpi.formatting import parse_size
from odc_mpi.models.configuration import ATTENTION_IMPLEMENTATIONS, unsupported_reason
from odc_mpi.simulate.options import OPTIONS, ScenarioOptions, option_name

if TYPE_CHECKING:
    from odc_mpi.simulate.scenario import Scenario

#: Maximum value of an integer option. Larger values are probably typos, and some system calls reject them.
MAX_VALUE = 10**9
BASE_HELP = "for adapters: directory or hub name of their base model; default: its directory in the training run"


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError` instead of exiting if an argument is invalid."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message and the command that prints the help."""
        raise UserError(f"{message}: see {self.prog} --help")


def as_path(text: str) -> Path:
    """Convert `text` to a path, in which a leading ``~`` is the home directory."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser fails for users that do not exist


def output(text: str) -> Path:
    """Convert `text`, which must not be empty, to the path of an output file or directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty string")
    return as_path(text)


def require_config(arguments: argparse.Namespace) -> None:
    """Raise `UserError` if the configuration file that the user passed as CONFIG does not exist."""
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


def count(text: str) -> int:
    """Parse an integer from 0 to `MAX_VALUE`."""
    if not (text.isascii() and text.isdecimal() and int(text[:20]) <= MAX_VALUE):
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to {MAX_VALUE:,}, got {text!r}")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Convert a size such as ``512M`` to a number of bytes."""
    num_bytes = parse_size(text)
    if num_bytes is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 0, got {text!r}")
    return num_bytes


def attention_name(text: str) -> str:
    """Return `text` unchanged if it names a supported attention implementation."""
    if text not in ATTENTION_IMPLEMENTATIONS:
        expected = " or ".join(ATTENTION_IMPLEMENTATIONS)
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}{unsupported_reason(text)}")
    return text


def add_scenario(parser: argparse.ArgumentParser, omitted: Collection[str] = (), **defaults: Any) -> None:
    """Add the options of a simulated scenario, except those of the fields in `omitted`.

    `defaults` overrides field defaults by name.
    """
    lengths = defaults.get("lengths", ScenarioOptions.lengths)
    help_text = f"longalign, swesmith, aime, equal or the path of a data set; default: {lengths}"
    parser.add_argument(
        "--lengths", type=lambda text: str(as_path(text)), default=lengths, metavar="NAME", help=help_text
    )
    for field, (number, option) in OPTIONS.items():
        if field in omitted:
            continue
        default = defaults.get(field, getattr(ScenarioOptions, field))
        is_size = field.endswith("_bytes")
        convert, metavar = (size_in_bytes, "SIZE") if is_size else (number, "N" if number is int else "X")
        help_text = f"{option.help}; default: {default:g}"
        parser.add_argument(
            option_name(field), dest=field, type=convert, default=default, metavar=metavar, help=help_text
        )


def build_scenario(arguments: argparse.Namespace) -> "Scenario":
    """Create a scenario from parsed options. Raises `UserError` if a value is invalid."""
    from odc_mpi.simulate.scenario import Scenario

    names = {field.name for field in fields(Scenario)}
    values = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    scenario = Scenario(**values)
    scenario.length_distribution  # noqa: B018 - an unknown name fails here
    return scenario


def utf8(text: str) -> str:
    """Return an argument decoded as UTF-8, even if Python decoded it with a different encoding."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {text!r}: {error.reason}") from None
