"""The command line: arguments to calls, exceptions to exit codes; nothing else.

0   done
2   the user's mistake: one line on standard error, from one rank
75  stopped on request after saving: start again to go on (0 if the file ODC_MPI_STOPPED_FILE is to tell it)
1   anything else
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from odc_mpi import bench_command, job_command
from odc_mpi.arguments import parser
from odc_mpi.checkpoint import command_line
from odc_mpi.errors import UserError, unusable
from odc_mpi.imports import no_collections
from odc_mpi.launcher import is_launched, launched_rank
from odc_mpi.limits import end_by_interrupt
from odc_mpi.ranks import on_ranks, say, start_of_mpi
from odc_mpi.train.ranklog import RankLog
from odc_mpi.train.stop import StopWish

if TYPE_CHECKING:
    from odc_mpi.comm.world import World
    from odc_mpi.train.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. What it communicates is its own affair.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments, rest = parser().parse_known_args(argv)
        if rest and arguments.command not in ("train", "job"):
            words = [arguments.command, *filter(None, [getattr(arguments, "benchmark", None)])]
            raise UserError(f"unknown argument {rest[0]}: see odc-mpi {' '.join(words)} --help")
        commands = {
            "prepare": _prepare,
            "train": _train,
            "doctor": _doctor,
            "bench": lambda arguments, _: bench_command.run(arguments),
            "simulate": _simulate,
            "checkpoint": lambda arguments, _: command_line.run(arguments),
            "report": _report,
            "job": job_command.run,
        }
        return commands[arguments.command](arguments, rest)
    except UserError as error:
        # Before MPI is up every rank makes the same mistake; one voice is enough.
        if launched_rank() == 0:
            say(error)
        return 2
    except OSError as error:
        if is_launched() and "mpi4py.MPI" in sys.modules:
            raise  # others may be waiting for this rank: the hook that a `World` has set ends them, too
        say(unusable(error))  # each rank: it may be this node's files alone
        return 2
    except KeyboardInterrupt:
        print("odc-mpi: interrupted", file=sys.stderr, flush=True)
        if is_launched():
            end_by_interrupt()  # some launchers take a rank that returns before MPI is up for one that is done
        return 130


def _prepare(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from rich.console import Console

    from odc_mpi.data.prepare import prepare

    console = Console(stderr=True)
    report = prepare(
        arguments.source,
        arguments.out,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        overlong=arguments.overlong,
        prompt_field=arguments.prompt_field,
        completion_field=arguments.completion_field,
        vocab_size=arguments.vocab_size,
        console=console,
    )
    print(report.describe())
    return 0


def _doctor(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from odc_mpi.doctor import doctor

    return doctor(arguments.json)


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from odc_mpi.train import config as configuration

    if arguments.help:
        print("usage: odc-mpi train [--config FILE] [--SECTION.KEY VALUE ...]\n\n" + configuration.help_text())
        return 0
    # From here on: a scheduler may want the end of a run that has hardly begun, and libraries warn when imported.
    with StopWish() as stop, RankLog(launched_rank()) as log:
        return _train_under(stop, log, arguments, overrides)


def _train_under(stop: StopWish, log: RankLog, arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    loaded = _load(arguments, overrides)
    # Not before here: torch and transformers take seconds, for which nobody needs to wait who made a mistake. In this
    # order: the last starts MPI, and a rank that fails to import anything after that would leave the others waiting.
    if not isinstance(loaded, UserError):
        with no_collections():
            importlib.import_module("odc_mpi.train.models")
    with start_of_mpi():
        from odc_mpi.comm.world import World

    world = World()
    return on_ranks(world, lambda: _train_as(world.agree(lambda: _unless_mistaken(loaded)), world, stop, log))


def _load(arguments: argparse.Namespace, overrides: Sequence[str]) -> "Config | UserError":
    """Read the settings once, as they may come from a pipe; return this rank's mistake, of which all are to hear."""
    from odc_mpi.train import config as configuration

    try:
        return configuration.load(arguments.config, overrides)
    except UserError as mistake:
        return mistake


def _unless_mistaken(loaded: "Config | UserError") -> "Config":
    if isinstance(loaded, UserError):
        raise loaded
    return loaded


def _train_as(config: "Config", world: "World", stop: StopWish, log: RankLog) -> None:
    from odc_mpi.train.trainer import train

    world.agree(lambda: log.open(config.run.log_dir, world))
    train(config, world, stop)


def _simulate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from odc_mpi.bench import simulate_command

    simulate_command.run(bench_command.scenario_of(arguments), arguments.json)
    return 0


def _report(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from odc_mpi.bench import report

    print(report.write(arguments.source, arguments.out, arguments.picture))
    return 0
