"""Entry point of the command-line interface: parses arguments, runs a command, and converts exceptions to exit codes.

0   success
2   invalid arguments, input or files, reported in one line; also if standard output could not be written completely
75  stopped on request after saving; to resume, run the same command again (0 if ODC_MPI_STOPPED_FILE is set)
130 interrupted
143 ended by SIGTERM, after temporary files have been removed
141 output pipe closed by its reader, as by `head` in `odc-mpi checkpoint show RUN | head` (128 + SIGPIPE, as in shells)
1   any other failure; commands that run sbatch return the exit code of that program
"""

import argparse
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

from odc_mpi import __version__
from odc_mpi.cli import config, data, doctor, job, prepare, report, run, simulate, train, watch
from odc_mpi.cli.model import chat, checkpoint, export, generate
from odc_mpi.cli.options import Parser
from odc_mpi.errors import UserError, file_error
from odc_mpi.formatting import did_you_mean
from odc_mpi.runtime.ranks import exit_as_interrupted, print_error
from odc_mpi.runtime.start.launch import is_launched, launched_rank
from odc_mpi.runtime.streams import open_standard_streams

#: Command modules by name, in the order in which the help lists them. Each module defines `HELP`, `add_arguments` and
#: `run`. Slow imports are in the functions. `run` raises `UserError` if arguments or input are invalid.
COMMANDS = {
    "prepare": prepare,
    "doctor": doctor,
    "train": train,
    "run": run,
    "export": export,
    "chat": chat,
    "generate": generate,
    "data": data,
    "checkpoint": checkpoint,
    "watch": watch,
    "report": report,
    "config": config,
    "job": job,
    "simulate": simulate,
}
#: Commands that accept settings (`--SECTION.KEY VALUE`), which the parser does not know.
_WITH_SETTINGS = ("train", "job", "config")
#: Commands that handle SIGTERM themselves, or that may wait in MPI, where Python does not run handlers of signals.
_WITH_RANKS = ("train", "run", "doctor", "generate", "chat")


def parser(names: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser for all commands, with the options of those in `names`. Invalid arguments raise `UserError`."""
    description = "Sharded post-training (SFT, LoRA, DPO, GRPO) of Hugging Face models over MPI."
    parser = Parser(prog="odc-mpi", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"odc-mpi {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        # `train` has a help of its own, with all settings.
        command_parser = commands.add_parser(name, help=command.HELP, allow_abbrev=False, add_help=command is not train)
        if name in names:
            command.add_arguments(command_parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises `UserError` if the command is unknown or an argument is invalid.

    The result also contains `argv`, a copy of the argument, `overrides`, the settings (`--SECTION.KEY VALUE`), and
    `training`, what follows `--` in `odc-mpi run`.
    """
    argv, training = run.split(argv) if argv[:1] == ["run"] else (argv, [])
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}: see odc-mpi --help")
    arguments, rest = parser(argv).parse_known_args(argv)
    if rest and arguments.command not in _WITH_SETTINGS:
        usage = " ".join(filter(None, ["odc-mpi", arguments.command, "--help"]))
        raise UserError(f"unknown argument {rest[0]}: see {usage}")
    arguments.argv, arguments.overrides, arguments.training = list(argv), rest, training
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default the one in `sys.argv`, and return the exit code. Collective if the command is."""
    if argv is not None:
        return _run(argv)
    output = open_standard_streams()
    code = _run(sys.argv[1:])
    sys.stdout.flush()
    if output.error is not None and code == 0:
        print_error(f"the command succeeded, but its output could not be written: {output.error.strerror}")
        return 2
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = parse(argv)
        if arguments.command is None:
            parser().print_help()
            return 0
        with nullcontext() if arguments.command in _WITH_RANKS else _sigterm_handled():
            code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()  # a closed pipe raises here; at the exit, Python would print a traceback
        return code
    except UserError as error:
        # Before MPI starts, every rank has the same error: only one prints it.
        if launched_rank() == 0:
            print_error(error)
        return 2
    except OSError as error:
        if is_launched() and "mpi4py.MPI" in sys.modules:
            raise  # other ranks may be waiting for this one: the exception hook of `World` ends them, too
        if isinstance(error, BrokenPipeError):
            # Python flushes the rest of the buffer at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print_error(file_error(error))  # on each rank: other nodes may have other files
        return 2
    except KeyboardInterrupt:
        print("odc-mpi: interrupted", file=sys.stderr, flush=True)
        if is_launched():
            exit_as_interrupted()  # some launchers treat a rank that returns before MPI starts as successful
        return 130


@contextmanager
def _sigterm_handled() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: object) -> NoReturn:
    os.write(2, b"odc-mpi: ended by SIGTERM\n")  # not with print, which the signal may have interrupted
    sys.exit(128 + number)
