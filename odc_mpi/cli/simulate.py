"""`odc-mpi simulate`: estimate the speed-up of windows over collectives by balancing strategy. Does not use MPI."""

import argparse
import json

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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_scenario(parser)
    parser.add_argument("--wire", choices=WIRE_BYTES, help="islands.wire, with --sync-every; default: float32")
    parser.set_defaults(num_minibatches=None)


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, print the results, and return the exit code."""
    from odc_mpi.simulate.simulate import simulate

    if arguments.num_minibatches is None:
        each = max(1, arguments.ranks * arguments.per_rank)
        arguments.num_minibatches = max(1, min(ScenarioOptions.num_minibatches, MAX_DEFAULT_SEQUENCES // each))
    result = {"benchmark": "simulate", **simulate(build_scenario(arguments))}
    if arguments.json:
        print(json.dumps(result, allow_nan=False), flush=True)
        return 0
    # Imported late: both imports are slow.
    from odc_mpi.observe.terminal import make_console
    from odc_mpi.report.page import terminal
    from odc_mpi.report.schedule_report import describe

    make_console().print(terminal(describe(result)))
    return 0
