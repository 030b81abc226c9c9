"""`odc-mpi bench gpu`, GPUs: its options and its run."""

import argparse
from pathlib import Path

from odc_mpi.cli.bench.under_mpiexec import add_rounds, start_ranks
from odc_mpi.cli.options import positive
from odc_mpi.runtime.launch import is_launched

HELP = "fetches, pushes, kernels and steps on GPUs beside plain copies and plain torch"
DESCRIPTION = "GB/s of units to and from GPUs, and what a step costs."
#: Sizes of units: a layer in bf16 of a model of a billion parameters has about 96M.
GPU_SIZES = "4M,16M,64M,256M"
#: As `bench.gpu.benchmark.PARTS`, which takes torch to import.
PARTS = ("bandwidths", "kernels", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.add_argument("--sizes", default=GPU_SIZES, metavar="LIST", help=f"of units and shards; default: {GPU_SIZES}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: 1 B parameters in bf16")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    add_rounds(parser, 7)
    parser.add_argument(
        "--window-device",
        choices=("auto", "cuda", "cpu"),
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


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    from odc_mpi.bench.gpu import run as gpu_command

    options = gpu_command.options(arguments)
    if is_launched():
        return gpu_command.run(options, arguments.json)
    gpu_command.require_gpu()
    return start_ranks(arguments, arguments.ranks or 2)
