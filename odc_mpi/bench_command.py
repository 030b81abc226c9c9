"""`odc-mpi bench`: starts mpiexec where it is not under it, and measures on all ranks."""

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from odc_mpi.arguments import SCENARIO
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.imports import no_collections
from odc_mpi.launcher import is_launched
from odc_mpi.ranks import on_ranks, say, start_of_mpi

if TYPE_CHECKING:
    from odc_mpi.bench.scenario import Scenario
    from odc_mpi.comm.world import World


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark and return the exit code. Collective, under mpiexec."""
    benchmarks = {
        "transport": _transport,
        "schedule": _schedule,
        "train": _train,
        "checkpoint": _checkpoint,
        "progress": _progress,
        "gpu": _gpu,
    }
    return benchmarks[arguments.benchmark](arguments)


def _transport(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes, speaker

    sizes = parse_sizes(DEFAULT_SIZES if arguments.sizes is None else arguments.sizes)
    if not is_launched():
        words = ["transport", "--sizes", ",".join(map(str, sizes)), "--repeats", arguments.repeats]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see `odc_mpi.cli`.
    from odc_mpi.bench.tables import transport_tables
    from odc_mpi.train.metrics import make_console

    with no_collections(), start_of_mpi():
        from odc_mpi.bench.transport import measure

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        result = measure(world, sizes, arguments.repeats, speaker(world.rank))
        if world.rank == 0 and arguments.json:
            print(json.dumps(result), flush=True)
        elif world.rank == 0:
            make_console().print(transport_tables(result))

    return on_ranks(world, work)


def _schedule(arguments: argparse.Namespace) -> int:
    scenario = scenario_of(arguments)
    if not is_launched():
        options = ["--lengths", "--step-s", *(option for option, *_ in SCENARIO)]
        values = {option: getattr(arguments, option[2:].replace("-", "_")) for option in options}
        values["--ranks"] = scenario.ranks
        words = ["schedule", *(word for option, value in values.items() for word in (option, value))]
        return _launch(arguments, scenario.ranks, words)
    # Not before here, and MPI last: see `odc_mpi.cli`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench import schedule_command

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        here = world.agree(lambda: replace(scenario, ranks=world.size))
        schedule_command.run(world, here, arguments.step_s, arguments.json)

    return on_ranks(world, work)


def _train(arguments: argparse.Namespace) -> int:
    if not is_launched():
        words = ["train", "--steps", arguments.steps, "--repeats", arguments.repeats]
        words += ["--config", arguments.config] if arguments.config else []
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see `odc_mpi.cli`.
    with no_collections():
        importlib.import_module("odc_mpi.train.models")
    with no_collections(), start_of_mpi():
        from odc_mpi.bench import train_command

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        train_command.run(world, arguments.config, arguments.steps, arguments.repeats, arguments.json)

    return on_ranks(world, work)


def _checkpoint(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import parse_sizes

    size = parse_sizes(arguments.size)[0]
    if not is_launched():
        words = ["checkpoint", "--size", size, "--dir", arguments.dir.absolute(), "--repeats", arguments.repeats]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see `odc_mpi.cli`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench.checkpoint import measure, report

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        result = measure(world, size, arguments.repeats, arguments.dir)
        if world.rank == 0:
            print(json.dumps(result) if arguments.json else report(result), flush=True)

    return on_ranks(world, work)


def _progress(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import parse_sizes

    sizes, push_sizes = parse_sizes(arguments.sizes), parse_sizes(arguments.push_sizes, "--push-sizes")
    if arguments.ranks == 1:
        raise UserError("--ranks 1: expected two or more, of which one computes")
    if not is_launched():
        words = ["progress", "--sizes", ",".join(map(str, sizes)), "--push-sizes", ",".join(map(str, push_sizes))]
        words += ["--repeats", arguments.repeats, "--budget-s", arguments.budget_s]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see `odc_mpi.cli`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench import progress_command

    world = _world(arguments)

    def work() -> None:
        _check_ranks(arguments, world)
        progress_command.run(world, sizes, push_sizes, arguments.repeats, arguments.budget_s, arguments.json)

    return on_ranks(world, work)


def _gpu(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench import gpu_command

    options = gpu_command.options(arguments)
    if is_launched():
        return gpu_command.run(options, arguments.json)
    gpu_command.require_gpu()
    return _launch(arguments, arguments.ranks or 2, gpu_command.words(options))


def scenario_of(arguments: argparse.Namespace) -> "Scenario":
    """Return the scenario that the options tell of, those of `simulate`, too. Local."""
    from odc_mpi.bench.scenario import REFERENCE_COST, Scenario

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: value for name, value in given.items() if name in Scenario.__dataclass_fields__}
    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**settings, num_minibatches=arguments.minibatches, num_units=arguments.units, cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario


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
        say(error)
        return 1
