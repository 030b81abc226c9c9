"""`odc-mpi simulate`: its options and its run. One process, no MPI."""

import argparse

from odc_mpi.bench.measure import show
from odc_mpi.cli.options import positive, step_seconds
from odc_mpi.cli.scenario import add_option, add_scenario, rollouts_of, scenario_of
from odc_mpi.simulate.options import GENERATION, RANKS, SCENARIO, TICKET_S, usual_minibatches

HELP = "what schedules would achieve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.description = "Reckon speed-ups of windows over collectives, by how sequences are dealt out. Needs no MPI."
    add_option(parser, "ranks", RANKS)
    usual = SCENARIO["num_minibatches"].default
    add_scenario(parser, {"num_minibatches": f"{usual}, fewer where they have thousands of sequences"})
    add_option(parser, "ticket_s", TICKET_S)
    # Whoever has the options of a measurement has them for the reckoning beside it, too.
    parser.add_argument("--step-s", type=step_seconds, metavar="X", help="of bench schedule; nothing here")
    parser.add_argument("--timeout-s", type=positive, metavar="SECONDS", help="of bench schedule; nothing here")


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, print what came of it, and return the exit code. Local.

    Raises:
        UserError: Its lengths are not to be had.
    """
    from odc_mpi.simulate.advice import advice
    from odc_mpi.simulate.simulate import simulate

    if arguments.num_minibatches is None:
        completions = arguments.completions or GENERATION["completions"].default
        each = arguments.per_rank * (completions if arguments.workload == "grpo" else 1)
        arguments.num_minibatches = usual_minibatches(arguments.ranks, each)
    if arguments.workload == "grpo":
        from odc_mpi.simulate.rollouts import simulate_rollouts

        show({"benchmark": "simulate", **simulate_rollouts(rollouts_of(arguments)).as_json()}, arguments.json)
        return 0
    scenario = scenario_of(arguments)
    show({"benchmark": "simulate", **simulate(scenario).as_json()}, arguments.json)
    if not arguments.json:
        print(f"\n{advice(scenario)}")
    return 0
