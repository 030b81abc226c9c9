"""The command line: arguments to calls, exceptions to exit codes; nothing else.

0   done
2   the user's mistake: one line on standard error, from one rank
75  stopped on request after saving: start again to go on (0 if the file ODC_MPI_STOPPED_FILE is to tell it)
141 nobody reads the output any more, as of `odc-mpi checkpoint show run | head`: a shell's code for SIGPIPE
1   anything else
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from odc_mpi import __version__
from odc_mpi.cli import bench, checkpoint, doctor, generate, job, prepare, report, simulate, train
from odc_mpi.errors import UserError, file_error
from odc_mpi.runtime.ranks import print_error
from odc_mpi.runtime.start.launch import is_launched, launched_rank
from odc_mpi.runtime.start.limits import end_by_interrupt

#: In the order of the help. Each has `HELP`, `add_arguments` and `run`, and imports what takes time when it runs.
COMMANDS = {
    "prepare": prepare,
    "doctor": doctor,
    "train": train,
    "generate": generate,
    "job": job,
    "bench": bench,
    "simulate": simulate,
    "checkpoint": checkpoint,
    "report": report,
}
#: These take settings, `--SECTION.KEY VALUE`, which are not arguments of the parser.
_WITH_SETTINGS = ("train", "job")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as any other mistake, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it raises UserError instead of exiting."""
    parser = _Parser(prog="odc-mpi", description="Post-training over MPI windows.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"odc-mpi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        # `train` shows all settings as its help, which takes a while to load.
        add_help = command is not train
        command.add_arguments(commands.add_parser(name, help=command.HELP, allow_abbrev=False, add_help=add_help))
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command, with `words`, all that was written, and `overrides`, the settings.

    Raises:
        UserError: There is no such command or argument.
    """
    arguments, rest = parser().parse_known_args(argv)
    if rest and arguments.command not in _WITH_SETTINGS:
        words = [arguments.command, *filter(None, [getattr(arguments, "benchmark", None)])]
        raise UserError(f"unknown argument {rest[0]}: see odc-mpi {' '.join(words)} --help")
    arguments.words, arguments.overrides = list(argv), rest
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Collective, if the command is.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is heard; Python's own flush at the exit would complain
        return code
    except UserError as error:
        # Before MPI is up every rank makes the same mistake; one voice is enough.
        if launched_rank() == 0:
            print_error(error)
        return 2
    except OSError as error:
        if is_launched() and "mpi4py.MPI" in sys.modules:
            raise  # others may be waiting for this rank: the hook that a `World` has set ends them, too
        if isinstance(error, BrokenPipeError):
            # What is still in the buffer has to go somewhere when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print_error(file_error(error))  # each rank: it may be this node's files alone
        return 2
    except KeyboardInterrupt:
        print("odc-mpi: interrupted", file=sys.stderr, flush=True)
        if is_launched():
            end_by_interrupt()  # some launchers take a rank that returns before MPI is up for one that is done
        return 130
