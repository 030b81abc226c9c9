"""`odc-mpi bench`: the benchmarks, each with its options and its run.

Each starts mpiexec where it is not under it, and measures on all ranks. What measures is imported by the ranks alone.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from odc_mpi.bench.gpu import run as gpu_command
from odc_mpi.bench.gpu.run import PARTS
from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes, show, speaker
from odc_mpi.cli import mpiexec
from odc_mpi.cli.options import positive, step_seconds
from odc_mpi.cli.scenario import add_scenario, fill_in, of_workloads, rollouts_of, scenario_of
from odc_mpi.errors import UserError
from odc_mpi.runtime.ranks import no_collections, on_ranks, say, start_of_mpi
from odc_mpi.runtime.start.launch import is_launched
from odc_mpi.simulate.options import RANKS
from odc_mpi.stack.decision import WindowDevice

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

HELP = "measure what this machine achieves"
#: Of units on GPUs: a layer in bf16 of a model of a billion parameters has about 96M.
GPU_SIZES = "4M,16M,64M,256M"
#: Of `bench schedule`, for training, and with generation: there are eight times as many sequences in a minibatch, so
#: the collectives of ranks that share cores would take longer than what is slept for.
SCHEDULE_DEFAULTS = {"num_minibatches": (10, 5), "num_units": (4, 1)}
STEP_S = (1.0, 6.0)
#: Sizes that are read from ranks that compute, and pushed to them.
GET_SIZES, PUSH_SIZES = "64,1M,16M", "512K,2M,8M,32M"

#: Tells a person what is measured next.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        help: What it measures, in the list of benchmarks.
        description: What it tells, above its own options.
        add_arguments: Adds its options.
        run: Measures on all ranks, and returns the exit code; raises `UserError` if an option is wrong.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options. Local."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        description = f"{benchmark.description} Starts mpiexec if it is not under it."
        one = benchmarks.add_parser(name, help=benchmark.help, description=description, allow_abbrev=False)
        benchmark.add_arguments(one)
        one.add_argument(
            "--timeout-s", type=positive, default=900, metavar="SECONDS", help="until all ends; default: 900"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    return BENCHMARKS[arguments.benchmark].run(arguments)


def _add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--repeats", type=positive, default=repeats, metavar="N", help=f"rounds; default: {repeats}")
    parser.add_argument("--ranks", type=positive, metavar="N", help="to start; default: 2, or mpiexec's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _start_ranks(arguments: argparse.Namespace, ranks: int) -> int:
    """Run the same command, word for word, on some ranks under mpiexec, and return the exit code."""
    try:
        return mpiexec.run(ranks, arguments.words, timeout_s=arguments.timeout_s)
    except TimeoutError as error:
        say(error)
        return 1


def _measure_on_ranks(
    arguments: argparse.Namespace,
    module: str,
    measure: "Callable[[Any, World, Say], Mapping[str, Any]]",
    ranks: int | None = None,
) -> int:
    """Start the ranks, or as one of them measure and let rank 0 print; return the exit code. Collective, under mpiexec.

    Args:
        arguments: Of the command line.
        module: The benchmark, imported by the ranks alone.
        measure: Called with that module, the ranks and a function that tells a person what is measured next; returns
            the benchmark's object.
        ranks: How many to start; None for `--ranks`, or 2.
    """
    if not is_launched():
        return _start_ranks(arguments, ranks or arguments.ranks or 2)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections(), start_of_mpi():
        benchmark = importlib.import_module(module)
        from odc_mpi.bench.together import require_ranks
        from odc_mpi.runtime.world import World

    # A single wait may last as long as all of it, since a round of some does.
    world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

    def work() -> None:
        require_ranks(world, arguments.ranks)
        result = measure(benchmark, world, speaker(world.rank))
        if world.rank == 0:
            show(result, arguments.json)

    return on_ranks(world, work)


def _add_transport(parser: argparse.ArgumentParser) -> None:
    meaning = "of units, such as 64K,1M,256M; default: 64K to 256M"
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="LIST", help=meaning)
    _add_rounds(parser, 7)


def _run_transport(arguments: argparse.Namespace) -> int:
    sizes = parse_sizes(arguments.sizes)
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.transport",
        lambda transport, world, say: transport.measure(world, sizes, arguments.repeats, say),
    )


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help=f"to start; default: {RANKS.default}, or mpiexec's")
    add_scenario(parser, {field: of_workloads(*of_either) for field, of_either in SCHEDULE_DEFAULTS.items()})
    meaning = f"seconds an even share of a minibatch is scaled to; default: {of_workloads(*STEP_S)}"
    parser.add_argument("--step-s", type=step_seconds, metavar="X", help=meaning)


def _run_schedule(arguments: argparse.Namespace) -> int:
    fill_in(arguments, {**SCHEDULE_DEFAULTS, "step_s": STEP_S})
    rollouts = rollouts_of(arguments) if arguments.workload == "grpo" else None
    scenario = rollouts.scenario if rollouts else scenario_of(arguments)

    def on_all(world: "World") -> Any:
        """Return the scenario, or the rollouts, on as many ranks as there are. Local."""
        resized = replace(scenario, ranks=world.size)
        return replace(rollouts, scenario=resized) if rollouts else resized

    return _measure_on_ranks(
        arguments,
        f"odc_mpi.bench.{'rollouts' if rollouts else 'schedule'}",
        lambda bench, world, say: bench.measure(world, world.agree(lambda: on_all(world)), arguments.step_s, say),
        scenario.ranks,
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    parser.add_argument("--model", choices=("qwen2", "llama"), default="qwen2", help="without --config; default: qwen2")
    parser.add_argument("--no-caches", action="store_true", help="fetch and push anew in each microbatch")
    parser.add_argument("--exact", action="store_true", help="with run.exact besides, for what it costs")
    _add_rounds(parser, 7)


def _run_train(arguments: argparse.Namespace) -> int:
    if is_launched():  # a library that fails to load does so before MPI starts
        with no_collections():
            importlib.import_module("odc_mpi.models.build")
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.train",
        lambda train, world, say: train.measure(
            world,
            train.configuration(world, arguments.config, say, arguments.model, caches=not arguments.no_caches),
            arguments.steps,
            arguments.repeats,
            say,
            exact=arguments.exact,
        ),
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1G", metavar="SIZE", help="of the state of all ranks; default: 1G")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="on the disk that is meant; default: .")
    _add_rounds(parser, 5)


def _run_checkpoint(arguments: argparse.Namespace) -> int:
    size = parse_sizes(arguments.size)[0]
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.checkpoint",
        lambda checkpoint, world, _: checkpoint.measure(world, size, arguments.repeats, arguments.dir),
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    for option, what, default in (("--sizes", "Gets", GET_SIZES), ("--push-sizes", "pushes", PUSH_SIZES)):
        parser.add_argument(option, default=default, metavar="LIST", help=f"of {what}; default: {default}")
    _add_rounds(parser, 9)
    parser.add_argument(
        "--budget-s", type=positive, default=10, metavar="X", help="for the pushes of a size by one way; default: 10"
    )


def _run_progress(arguments: argparse.Namespace) -> int:
    sizes, push_sizes = parse_sizes(arguments.sizes), parse_sizes(arguments.push_sizes, "--push-sizes")
    if arguments.ranks == 1:
        raise UserError("--ranks 1: expected two or more, of which one computes")
    repeats, budget_s = arguments.repeats, arguments.budget_s
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.progress.benchmark",
        lambda progress, world, say: progress.measure(world, sizes, push_sizes, repeats, budget_s, say),
    )


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default=GPU_SIZES, metavar="LIST", help=f"of units and shards; default: {GPU_SIZES}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: 1 B parameters in bf16")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    _add_rounds(parser, 7)
    parser.add_argument(
        "--window-device",
        choices=get_args(WindowDevice),
        default="auto",
        help="windows on GPUs: where odc-mpi doctor has proved them, in any case, or not at all; default: auto",
    )
    every = ",".join(PARTS)
    parser.add_argument("--parts", type=_parts, default=every, metavar="LIST", help=f"default: {every}")


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    return parts


def _run_gpu(arguments: argparse.Namespace) -> int:
    options = gpu_command.options(arguments)
    if is_launched():
        return gpu_command.run(options, arguments.json)
    gpu_command.require_gpu()
    return _start_ranks(arguments, arguments.ranks or 2)


#: In the order of the help.
BENCHMARKS = {
    "transport": Benchmark(
        "fetches and pushes beside memcpy, MPI's collectives and gloo",
        "GB/s of fetching units and pushing gradients.",
        _add_transport,
        _run_transport,
    ),
    "schedule": Benchmark(
        "windows, collectives and tickets on many ranks, with sleeps in place of computation",
        "Speed-ups of windows over collectives on the real runtime.",
        _add_schedule,
        _run_schedule,
    ),
    "train": Benchmark(
        "training with windows beside FSDP2, collectives and processes apart",
        "Tokens per second of every way to train.",
        _add_train,
        _run_train,
    ),
    "checkpoint": Benchmark(
        "checkpoints beside plain files and torch.distributed.checkpoint",
        "GB/s of writing and reading, and the pause of the training.",
        _add_checkpoint,
        _run_checkpoint,
    ),
    "progress": Benchmark(
        "reading from and pushing to ranks that compute, and what serving costs them",
        "What the progress thread achieves and costs.",
        _add_progress,
        _run_progress,
    ),
    "gpu": Benchmark(
        "fetches, pushes, kernels and steps on GPUs beside plain copies and plain torch",
        "GB/s of units to and from GPUs, and what a step costs.",
        _add_gpu,
        _run_gpu,
    ),
}
