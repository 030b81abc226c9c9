"""`odc-mpi simulate`: estimate the speed-up of windows over collectives by balancing strategy. Does not use MPI."""

import argparse

from odc_mpi.bench.measure import print_result
from odc_mpi.cli.options import add_scenario, build_scenario
from odc_mpi.simulate.options import WIRE_BYTES, ScenarioOptions

HELP = "estimate the speed-up of balancing strategies; needs no MPI"
#: Default limit on the total number of sequences in all minibatches. Simulating 1,000 ranks then takes ten seconds.
MAX_DEFAULT_SEQUENCES = 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi simulate`."""
    parser.description = (
        "Estimate the speed-up of windows over collectives, by balancing strategy. Does not need MPI. Large scenarios "
        "have fewer minibatches by default."
    )
    add_scenario(parser)
    parser.add_argument("--wire", choices=WIRE_BYTES, help="islands.wire, with --sync-every; default: float32")
    parser.set_defaults(num_minibatches=None)


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, print the results, and return the exit code."""
    from odc_mpi.simulate.simulate import simulate

    if arguments.num_minibatches is None:
        each = max(1, arguments.ranks * arguments.per_rank)
        arguments.num_minibatches = max(1, min(ScenarioOptions.num_minibatches, MAX_DEFAULT_SEQUENCES // each))
    print_result({"benchmark": "simulate", **simulate(build_scenario(arguments))}, arguments.json)
    return 0
