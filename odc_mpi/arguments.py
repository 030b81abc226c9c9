"""The command line's arguments: which there are, what they mean, what they are without a word. No calls.

Those of `odc-mpi train` beyond its file are settings (`train.config`), those of `odc-mpi checkpoint` in its room.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from odc_mpi import __version__
from odc_mpi.checkpoint import command_line
from odc_mpi.errors import UserError
from odc_mpi.job_command import CHOICES

#: What a scenario of `odc-mpi simulate` and `bench schedule` is made of, besides lengths, ranks and tickets, with the
#: former's defaults.
SCENARIO: tuple[tuple[str, int | float, str], ...] = (
    ("--per-rank", 8, "sequences per rank and minibatch"),
    ("--minibatches", 30, "how many are drawn"),
    ("--seed", 0, "everything follows from it"),
    ("--packing-ratio", 1.0, "most tokens in a microbatch, in longest sequences"),
    ("--speed-variation", 0.0, "standard deviation of a rank's speed, of mean 1"),
    ("--cost-error", 0.0, "standard deviation of a sequence's time to its cost"),
    ("--overhead-s", 0.0, "seconds of a microbatch besides its sequences"),
    ("--units", 28, "units of the model"),
    ("--unit-bytes", 0, "bytes of a unit; 0: of a model of 1.5 B parameters in bf16, by its units"),
    ("--fetch-gb-per-s", 0.0, "of a unit; 0 is free"),
    ("--push-gb-per-s", 0.0, "of a unit; 0 is free"),
)
#: Ranks of a scenario, unless mpiexec says how many.
RANKS = 8
#: No count and no number of seconds is larger: what is, was a slip, and not every system call takes it.
MOST = 10**9

#: Units of `odc-mpi bench gpu`: a layer in bf16 of a model of a billion parameters has about 96M.
GPU_SIZES = "4M,16M,64M,256M"
#: As `bench.gpu.PARTS`, which takes torch to import.
GPU_PARTS = ("bandwidths", "kernels", "step")
#: What `bench progress` reads and pushes.
GET_SIZES, PUSH_SIZES = "64,1M,16M", "512K,2M,8M,32M"

#: How large a job of `odc-mpi job` is.
JOB = (
    ("--nodes", 1, "how many"),
    ("--ranks-per-node", 8, "ranks of each, as many as it has GPUs, say"),
    ("--cores-per-rank", 8, "cores of each rank"),
)


_STEP_S = "seconds an even share of a minibatch is scaled to"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as any other mistake, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it raises UserError instead of exiting. Local."""
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
    _add_job(commands.add_parser("job", help="a batch script for Slurm from a configuration", allow_abbrev=False))
    _add_bench(commands.add_parser("bench", help="measure what this machine achieves", allow_abbrev=False))
    _add_simulate(commands.add_parser("simulate", help="what schedules would achieve", allow_abbrev=False))
    command_line.add_arguments(
        commands.add_parser("checkpoint", help="look into checkpoints, export them", allow_abbrev=False)
    )
    _add_report(commands.add_parser("report", help="a page with pictures of a run or a benchmark", allow_abbrev=False))
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


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.usage = "odc-mpi job CONFIG [options] [--SECTION.KEY VALUE ...]"
    parser.description = "Print the batch script that trains a configuration, and submit it on request."
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file that every node finds under this name")
    for option, default, meaning in JOB:
        parser.add_argument(option, type=_positive, default=default, metavar="N", help=f"{meaning}; default: {default}")
    parser.add_argument(
        "--time", default="04:00:00", help="limit, as sbatch takes it, 5 minutes or more; default: 04:00:00"
    )
    for name in CHOICES:
        parser.add_argument(f"--{name}", metavar="VALUE", help="of sbatch; default: none")
    parser.add_argument("--name", default="odc-mpi", help="of the job; default: odc-mpi")
    parser.add_argument("--stage", metavar="DIR", help="of each node: copy the data set there first")
    parser.add_argument("--mpi", metavar="TYPE", help="of srun; default: what this environment's MPI library needs")
    parser.add_argument("--submit", action="store_true", help="hand it to sbatch, too")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (what, description, add_options) in _BENCHMARKS.items():
        benchmark = benchmarks.add_parser(
            name,
            help=what,
            description=f"{description} Starts mpiexec if it is not under it.",
            allow_abbrev=False,
        )
        add_options(benchmark)
        _add_launch(benchmark)


def _add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", metavar="LIST", help="of units, such as 64K,1M,256M; default: 64K to 256M")
    _add_rounds(parser, 7)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help=f"to start; default: {RANKS}, or mpiexec's")
    _add_scenario(parser, {"--minibatches": 10, "--units": 4})
    parser.add_argument("--step-s", type=_step_s, default=1.0, metavar="X", help=f"{_STEP_S}; default: 1")


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=_positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    _add_rounds(parser, 7)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1G", metavar="SIZE", help="of the state of all ranks; default: 1G")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="on the disk that is meant; default: .")
    _add_rounds(parser, 5)


def _add_progress(parser: argparse.ArgumentParser) -> None:
    for option, what, default in (("--sizes", "Gets", GET_SIZES), ("--push-sizes", "pushes", PUSH_SIZES)):
        parser.add_argument(option, default=default, metavar="LIST", help=f"of {what}; default: {default}")
    _add_rounds(parser, 9)
    parser.add_argument(
        "--budget-s", type=_positive, default=10, metavar="X", help="for the pushes of a size by one way; default: 10"
    )


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default=GPU_SIZES, metavar="LIST", help=f"of units and shards; default: {GPU_SIZES}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: 1 B parameters in bf16")
    parser.add_argument("--steps", type=_positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    _add_rounds(parser, 7)
    parser.add_argument(
        "--window-device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="windows on GPUs: where odc-mpi doctor has proved them, in any case, or not at all; default: auto",
    )
    parts = ",".join(GPU_PARTS)
    parser.add_argument("--parts", type=_gpu_parts, default=parts, metavar="LIST", help=f"default: {parts}")


def _gpu_parts(text: str) -> list[str]:
    parts = text.split(",")
    unknown = [part for part in parts if part not in GPU_PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(GPU_PARTS)}, got {unknown[0]!r}")
    return parts


#: By name: what it is for, what it does, and what adds its options.
_BENCHMARKS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "transport": (
        "fetches and pushes beside memcpy, MPI's collectives and gloo",
        "GB/s of fetching units and pushing gradients.",
        _add_transport,
    ),
    "schedule": (
        "windows, collectives and tickets on many ranks, with sleeps in place of computation",
        "Speed-ups of windows over collectives on the real runtime.",
        _add_schedule,
    ),
    "train": (
        "training with windows beside FSDP2, collectives and a single process",
        "Tokens per second of every way to train.",
        _add_training,
    ),
    "checkpoint": (
        "checkpoints beside plain files and torch.distributed.checkpoint",
        "GB/s of writing and reading, and the pause of the training.",
        _add_saving,
    ),
    "progress": (
        "reading from and pushing to ranks that compute, and what serving costs them",
        "What the progress thread achieves and costs.",
        _add_progress,
    ),
    "gpu": (
        "fetches, pushes, kernels and steps on GPUs beside plain copies and plain torch",
        "GB/s of units to and from GPUs, and what a step costs.",
        _add_gpu,
    ),
}


def _add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--repeats", type=_positive, default=repeats, metavar="N", help=f"rounds; default: {repeats}")
    parser.add_argument("--ranks", type=_positive, metavar="N", help="to start; default: 2, or mpiexec's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    """Add what is asked of a command that starts mpiexec itself."""
    parser.add_argument(
        "--timeout-s", type=_positive, default=900, metavar="SECONDS", help="until all ends; default: 900"
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Reckon speed-ups of windows over collectives, by how sequences are dealt out. Needs no MPI."
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help=f"number of ranks; default: {RANKS}")
    _add_scenario(parser, {})
    parser.add_argument("--ticket-s", type=float, default=0.0, metavar="X", help="seconds to draw a ticket; default: 0")
    # Whoever has the options of a measurement has them for the reckoning beside it, too.
    parser.add_argument("--step-s", type=_step_s, metavar="X", help="of bench schedule; nothing here")
    parser.add_argument("--timeout-s", type=_positive, metavar="SECONDS", help="of bench schedule; nothing here")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write one HTML file with pictures, which needs no other file. Needs no MPI."
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_BENCH",
        help="a run directory, or what bench or simulate printed with --json",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html, or beside the JSON file")
    parser.add_argument("--picture", metavar="NAME", help="write this picture alone, as SVG, such as gantt")


def _add_scenario(parser: argparse.ArgumentParser, defaults: Mapping[str, int]) -> None:
    parser.add_argument(
        "--lengths",
        default="longalign",
        metavar="NAME",
        help="longalign, swesmith, aime, equal or the path of a data set; default: longalign",
    )
    for option, usual, meaning in SCENARIO:
        kind, default = type(usual), defaults.get(option, usual)
        metavar = "N" if kind is int else "X"
        parser.add_argument(
            option, type=kind, default=default, metavar=metavar, help=f"{meaning}; default: {default:g}"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= MOST):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, at most {MOST:,}, got {text!r}")
    return int(text)


def _step_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 3600:  # not a number is neither
        raise argparse.ArgumentTypeError(f"expected seconds from 0.001 to 3600, got {text!r}")
    return seconds
