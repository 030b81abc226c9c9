"""The command line: arguments to calls, exceptions to exit codes; nothing else.

0   done
2   the user's mistake: one line on standard error, from one rank
75  stopped on request after saving: start again to go on (0 if the file ODC_MPI_STOPPED_FILE is to tell it)
1   anything else
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi import job_command
from odc_mpi.arguments import SCENARIO, parser
from odc_mpi.checkpoint import command_line
from odc_mpi.errors import AgreedError, StoppedError, TrainingError, UserError, in_one_line
from odc_mpi.imports import no_collections
from odc_mpi.launcher import is_launched, launched_rank
from odc_mpi.limits import end_by_interrupt, start_limit
from odc_mpi.train.ranklog import RankLog
from odc_mpi.train.stop import StopWish

if TYPE_CHECKING:
    from odc_mpi.bench.scenario import Scenario
    from odc_mpi.comm.world import World
    from odc_mpi.train.config import Config

#: EX_TEMPFAIL of sysexits.h: a scheduler may be told to requeue a job that ends with it.
_STOPPED = 75


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
            "bench": _bench,
            "simulate": _simulate,
            "checkpoint": lambda arguments, _: command_line.run(arguments),
            "report": _report,
            "job": job_command.run,
        }
        return commands[arguments.command](arguments, rest)
    except UserError as error:
        # Before MPI is up every rank makes the same mistake; one voice is enough.
        if launched_rank() == 0:
            _say(error)
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
    with _start_of_mpi():
        from odc_mpi.comm.world import World

    world = World()
    return _on_ranks(world, lambda: _train_as(world.agree(lambda: _unless_mistaken(loaded)), world, stop, log))


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


def _bench(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    benchmarks = {
        "transport": _bench_transport,
        "schedule": _bench_schedule,
        "train": _bench_train,
        "checkpoint": _bench_checkpoint,
    }
    return benchmarks[arguments.benchmark](arguments)


def _bench_transport(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes

    sizes = parse_sizes(DEFAULT_SIZES if arguments.sizes is None else arguments.sizes)
    if not is_launched():
        words = ["transport", "--sizes", ",".join(map(str, sizes)), "--repeats", arguments.repeats]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see _train.
    from odc_mpi.bench.tables import transport_tables
    from odc_mpi.train.metrics import make_console

    with no_collections(), _start_of_mpi():
        from odc_mpi.bench.transport import measure

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        say = (
            partial(print, "odc-mpi: measuring", file=sys.stderr, flush=True) if world.rank == 0 else lambda line: None
        )
        result = measure(world, sizes, arguments.repeats, say)
        if world.rank == 0 and arguments.json:
            print(json.dumps(result), flush=True)
        elif world.rank == 0:
            make_console().print(transport_tables(result))

    return _on_ranks(world, work)


def _bench_schedule(arguments: argparse.Namespace) -> int:
    scenario = _scenario(arguments)
    if not is_launched():
        options = ["--lengths", "--step-s", *(option for option, *_ in SCENARIO)]
        values = {option: getattr(arguments, option[2:].replace("-", "_")) for option in options}
        values["--ranks"] = scenario.ranks
        words = ["schedule", *(word for option, value in values.items() for word in (option, value))]
        return _launch(arguments, scenario.ranks, words)
    # Not before here, and MPI last: see _train.
    with no_collections(), _start_of_mpi():
        from odc_mpi.bench import schedule_command

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        here = world.agree(lambda: replace(scenario, ranks=world.size))
        schedule_command.run(world, here, arguments.step_s, arguments.json)

    return _on_ranks(world, work)


def _bench_train(arguments: argparse.Namespace) -> int:
    if not is_launched():
        words = ["train", "--steps", arguments.steps, "--repeats", arguments.repeats]
        words += ["--config", arguments.config] if arguments.config else []
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see _train.
    with no_collections():
        importlib.import_module("odc_mpi.train.models")
    with no_collections(), _start_of_mpi():
        from odc_mpi.bench import train_command

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        train_command.run(world, arguments.config, arguments.steps, arguments.repeats, arguments.json)

    return _on_ranks(world, work)


def _bench_checkpoint(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import parse_sizes

    size = parse_sizes(arguments.size)[0]
    if not is_launched():
        words = ["checkpoint", "--size", size, "--dir", arguments.dir.absolute(), "--repeats", arguments.repeats]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see _train.
    with no_collections(), _start_of_mpi():
        from odc_mpi.bench.checkpoint import measure, report

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        result = measure(world, size, arguments.repeats, arguments.dir)
        if world.rank == 0:
            print(json.dumps(result) if arguments.json else report(result), flush=True)

    return _on_ranks(world, work)


@contextmanager
def _start_of_mpi() -> Iterator[None]:
    """Enclose the imports that start MPI: within a limit, and with a word to those who have no library."""
    from odc_mpi.comm.pmi import check_before_start

    with start_limit():
        try:
            check_before_start()
            yield
        except (ImportError, RuntimeError) as error:
            if not re.search(r"cannot load MPI|libmpi", str(error)):
                raise
            raise UserError(
                f"no MPI library found ({in_one_line(error)}): pip install 'odc_mpi[mpich]', or load your cluster's"
            ) from error


def _world(arguments: argparse.Namespace) -> "World":
    """Return the world of a benchmark: a single wait may last as long as all of it, since a round of some does."""
    from odc_mpi.comm.world import World

    return World(timeout_s=arguments.timeout_s, limit="--timeout-s")


def _check_ranks(arguments: argparse.Namespace, world: "World") -> None:
    if arguments.ranks not in (None, world.size):
        raise AgreedError(f"--ranks {arguments.ranks}: mpiexec started {world.size}, leave --ranks out under it")


def _launch(arguments: argparse.Namespace, ranks: int, words: Sequence[object]) -> int:
    """Run a benchmark under mpiexec."""
    from odc_mpi.bench import launch

    common = ["--timeout-s", arguments.timeout_s, *["--json"][: arguments.json]]
    try:
        return launch.run(ranks, ["bench", *map(str, (*words, *common))], timeout_s=arguments.timeout_s)
    except TimeoutError as error:
        _say(error)
        return 1


def _simulate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from odc_mpi.bench import simulate_command

    simulate_command.run(_scenario(arguments), arguments.json)
    return 0


def _report(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from odc_mpi.bench import report

    print(report.write(arguments.source, arguments.out, arguments.picture))
    return 0


def _scenario(arguments: argparse.Namespace) -> "Scenario":
    from odc_mpi.bench.scenario import REFERENCE_COST, Scenario

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: value for name, value in given.items() if name in Scenario.__dataclass_fields__}
    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**settings, num_minibatches=arguments.minibatches, num_units=arguments.units, cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario


def _on_ranks(world: "World", work: Callable[[], object]) -> int:
    """Do what all ranks do together, and end in an exit code, alone or with all of them."""
    from odc_mpi.comm.abort import abort

    code = 0
    try:
        work()
    except StoppedError as stopped:
        code = _tell_stopped(stopped, world.rank)
    except (AgreedError, TrainingError) as error:
        if world.rank == 0:
            _say(error)
        return 2 if isinstance(error, UserError) else 1
    except UserError as error:
        # Met by this rank alone, perhaps: the others may be waiting for it.
        abort(f"rank {world.rank}: {error}", code=2)
    except KeyboardInterrupt:
        abort("interrupted", code=130)
    world.close()
    return code


def _tell_stopped(stopped: StoppedError, rank: int) -> int:
    """Say that a run ended as asked, and return the exit code.

    A launcher that ends all ranks at the first bad exit code would kill those that are a little later, and pass on
    their code instead of ours. So a file can tell it; then the exit code is 0, unless rank 0 cannot write it.
    """
    note = os.environ.get("ODC_MPI_STOPPED_FILE")
    if rank == 0:
        print(f"odc-mpi: {stopped}", file=sys.stderr, flush=True)
    if rank == 0 and note:
        try:
            Path(note).touch()
        except OSError as error:
            print(f"odc-mpi: cannot write ODC_MPI_STOPPED_FILE={note}: {error.strerror}", file=sys.stderr, flush=True)
            return _STOPPED
    return 0 if note else _STOPPED


def _say(error: Exception) -> None:
    print(f"odc-mpi: error: {error}", file=sys.stderr, flush=True)
