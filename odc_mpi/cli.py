"""The command line: arguments to calls, exceptions to exit codes; nothing else.

0   done
2   the user's mistake: one line on standard error, from one rank
1   anything else
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from odc_mpi import __version__
from odc_mpi.errors import AgreedError, TrainingError, UserError
from odc_mpi.launcher import is_launched, launched_rank
from odc_mpi.limits import end_by_interrupt, start_limit

if TYPE_CHECKING:
    from odc_mpi.bench.scenario import Scenario
    from odc_mpi.comm.world import World

#: A benchmark's single wait for another rank lasts at most so long, in seconds: gloo takes a few for 256 MB.
_WAIT_S = 120

#: What a scenario of `odc-mpi simulate` and `bench schedule` is made of, besides lengths, with the former's defaults.
_SCENARIO: tuple[tuple[str, int | float, str], ...] = (
    ("--ranks", 8, "number of ranks"),
    ("--per-rank", 8, "sequences per rank and minibatch"),
    ("--minibatches", 30, "how many are drawn"),
    ("--seed", 0, "everything follows from it"),
    ("--packing-ratio", 1.0, "most tokens in a microbatch, in longest sequences"),
    ("--speed-variation", 0.0, "standard deviation of a rank's speed, of mean 1"),
    ("--cost-error", 0.0, "standard deviation of a sequence's time to its cost"),
    ("--overhead-s", 0.0, "seconds of a microbatch besides its sequences"),
    ("--units", 28, "units of the model"),
    ("--unit-bytes", 0, "bytes of a unit"),
    ("--fetch-gb-per-s", 0.0, "of a unit; 0 is free"),
    ("--push-gb-per-s", 0.0, "of a unit; 0 is free"),
    ("--ticket-s", 0.0, "seconds to draw a ticket"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. What it communicates is its own affair.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments, rest = _parser().parse_known_args(argv)
        if rest and arguments.command != "train":
            raise UserError(f"unknown argument {rest[0]}: see odc-mpi {arguments.command} --help")
        commands = {"prepare": _prepare, "train": _train, "doctor": _doctor, "bench": _bench, "simulate": _simulate}
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


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as any other mistake, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="odc-mpi", description="Post-training over MPI windows.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"odc-mpi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_prepare(commands.add_parser("prepare", help="turn text into tokens on disk", allow_abbrev=False))
    doctor = commands.add_parser(
        "doctor", help="what this MPI stack really does; under mpiexec on all its ranks", allow_abbrev=False
    )
    doctor.description = "Try the one-sided operations, and say what a run will therefore use."
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    train = commands.add_parser(
        "train",
        help="train a model; under mpiexec on all its ranks",
        usage="odc-mpi train [--config FILE] [--SECTION.KEY VALUE ...]",
        description="Settings come from the file; those on the command line win.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings")
    train.add_argument("-h", "--help", action="store_true", help="show all settings and exit")
    _add_bench(commands.add_parser("bench", help="measure what this machine achieves", allow_abbrev=False))
    _add_simulate(commands.add_parser("simulate", help="what schedules would achieve", allow_abbrev=False))
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a data set of token sequences, with a mask of what is trained."
    parser.add_argument("source", metavar="SOURCE", help="a JSONL file (.gz too), or stdlib: Python's own functions")
    parser.add_argument("out", metavar="OUT.h5", type=Path, help="the data set to write")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="Hugging Face tokenizer directory")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest sequence; default: no limit")
    parser.add_argument(
        "--overlong", choices=("truncate", "drop"), default="truncate", help="what to do with longer ones"
    )
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="JSONL field of the prompt")
    parser.add_argument(
        "--completion-field", default="completion", metavar="NAME", help="JSONL field of the completion"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the tokenizer trained on stdlib")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    transport = benchmarks.add_parser(
        "transport",
        help="fetches and pushes beside memcpy, MPI's collectives and gloo",
        description="GB/s of fetching units and pushing gradients. Starts mpiexec if it is not under it.",
        allow_abbrev=False,
    )
    transport.add_argument("--sizes", metavar="LIST", help="of units, such as 64K,1M,256M; default: 64K to 256M")
    transport.add_argument("--repeats", type=_positive, default=7, metavar="N", help="rounds; default: 7")
    transport.add_argument("--json", action="store_true", help="print one JSON object")
    transport.add_argument("--ranks", type=_positive, metavar="N", help="to start; default: 2, or mpiexec's")
    _add_launch(transport)
    schedule = benchmarks.add_parser(
        "schedule",
        help="windows, collectives and tickets on many ranks, with sleeps in place of computation",
        description="Speed-ups of windows over collectives on the real runtime. Starts mpiexec if it is not under it.",
        allow_abbrev=False,
    )
    _add_scenario(schedule, {"--minibatches": 10, "--units": 4})
    schedule.add_argument(
        "--step-s", type=float, default=1.0, metavar="X", help="seconds an even share of a minibatch is scaled to"
    )
    _add_launch(schedule)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    """Add what is asked of a command that starts mpiexec itself."""
    parser.add_argument(
        "--timeout-s", type=_positive, default=900, metavar="SECONDS", help="until all ends; default: 900"
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Reckon speed-ups of windows over collectives, by how sequences are dealt out. Needs no MPI."
    _add_scenario(parser, {})


def _add_scenario(parser: argparse.ArgumentParser, defaults: Mapping[str, int]) -> None:
    parser.add_argument(
        "--lengths",
        default="longalign",
        metavar="NAME",
        help="longalign, swesmith, aime or the path of a data set; default: longalign",
    )
    for option, usual, meaning in _SCENARIO:
        kind, default = type(usual), defaults.get(option, usual)
        metavar = "N" if kind is int else "X"
        parser.add_argument(
            option, type=kind, default=default, metavar=metavar, help=f"{meaning}; default: {default:g}"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


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
    # Not before here: torch and transformers take seconds. In this order: the last starts MPI, and a rank that fails to
    # import anything after that would leave the others waiting.
    importlib.import_module("odc_mpi.train.models")
    with start_limit():
        from odc_mpi.comm.world import World
    from odc_mpi.train.trainer import train

    world = World()
    return _on_ranks(world, lambda: train(world.agree(lambda: configuration.load(arguments.config, overrides)), world))


def _bench(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    return {"transport": _bench_transport, "schedule": _bench_schedule}[arguments.benchmark](arguments)


def _bench_transport(arguments: argparse.Namespace) -> int:
    from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes

    sizes = parse_sizes(DEFAULT_SIZES if arguments.sizes is None else arguments.sizes)
    if not is_launched():
        words = ["transport", "--sizes", ",".join(map(str, sizes)), "--repeats", arguments.repeats]
        return _launch(arguments, arguments.ranks or 2, words)
    # Not before here, and MPI last: see _train.
    from odc_mpi.bench.tables import transport_tables
    from odc_mpi.train.metrics import make_console

    with start_limit():
        from odc_mpi.bench.transport import measure
        from odc_mpi.comm.world import World

    world = World(timeout_s=min(_WAIT_S, arguments.timeout_s))

    def work() -> None:
        if arguments.ranks not in (None, world.size):
            raise AgreedError(f"--ranks {arguments.ranks}: mpiexec started {world.size}, leave --ranks out under it")
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
        options = ["--lengths", "--step-s", *(option for option, *_ in _SCENARIO)]
        values = {option: getattr(arguments, option[2:].replace("-", "_")) for option in options}
        words = ["schedule", *(word for option, value in values.items() for word in (option, value))]
        return _launch(arguments, scenario.ranks, words)
    # Not before here, and MPI last: see _train.
    with start_limit():
        from odc_mpi.bench import schedule_command
        from odc_mpi.comm.world import World

    world = World(timeout_s=min(_WAIT_S, arguments.timeout_s))
    return _on_ranks(world, lambda: schedule_command.run(world, scenario, arguments.step_s, arguments.json))


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


def _scenario(arguments: argparse.Namespace) -> "Scenario":
    from odc_mpi.bench.scenario import REFERENCE_COST, Scenario

    settings = {name: value for name, value in vars(arguments).items() if name in Scenario.__dataclass_fields__}
    cost = replace(REFERENCE_COST, constant=arguments.overhead_s)
    scenario = Scenario(**settings, num_minibatches=arguments.minibatches, num_units=arguments.units, cost=cost)
    scenario.source  # noqa: B018 - a wrong name is found here, before anything is started
    return scenario


def _on_ranks(world: "World", work: Callable[[], object]) -> int:
    """Do what all ranks do together, and end in an exit code, alone or with all of them."""
    from odc_mpi.comm.abort import abort

    try:
        work()
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
    return 0


def _say(error: Exception) -> None:
    print(f"odc-mpi: error: {error}", file=sys.stderr, flush=True)
