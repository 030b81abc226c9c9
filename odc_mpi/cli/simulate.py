"""`odc-mpi simulate`: its options and its run. One process, no MPI."""

import argparse

from odc_mpi.bench.measure import show
from odc_mpi.cli.scenario import add_option, add_scenario, scenario_of
from odc_mpi.errors import UserError
from odc_mpi.simulate.options import GENERATION, LENGTHS, RANKS, SCENARIO, TICKET_S

HELP = "what schedules would achieve"
#: At most about so many sequences are drawn by default: a thousand ranks then take ten seconds.
DRAWN_SEQUENCES = 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.description = (
        "Compute speed-ups of windows over collectives, by balance. Needs no MPI. Of minibatches with thousands of "
        "sequences fewer are drawn by default."
    )
    add_option(parser, "ranks", RANKS)
    parser.add_argument("--lengths", metavar="NAME", help=f"{LENGTHS}; default: longalign, of grpo: aime")
    parser.add_argument(
        "--workload",
        choices=("sft", "grpo"),
        default="sft",
        help="sft: training; grpo: generation and training in one minibatch; default: sft",
    )
    for field, option in GENERATION.items():
        meaning = f"of --workload grpo: {option.meaning}; default: {option.default:g}"
        add_option(parser, field, option, default=None, help=meaning)
    add_scenario(parser)
    parser.set_defaults(num_minibatches=None)
    add_option(parser, "ticket_s", TICKET_S)


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, print the outcome, and return the exit code. Local.

    Raises:
        UserError: A value is wrong, or there are no such lengths.
    """
    from odc_mpi.simulate.advice import advice
    from odc_mpi.simulate.rollouts import Rollouts, simulate_rollouts
    from odc_mpi.simulate.scenario import Scenario
    from odc_mpi.simulate.simulate import simulate

    is_grpo = arguments.workload == "grpo"
    for field, option in GENERATION.items():
        if getattr(arguments, field) is not None and not is_grpo:
            raise UserError(f"{option.name}: expected --workload grpo, too, got {arguments.workload}")
    if arguments.num_minibatches is None:
        completions = (arguments.completions or GENERATION["completions"].default) if is_grpo else 1
        each = max(1, arguments.ranks * arguments.per_rank * completions)
        arguments.num_minibatches = max(1, min(SCENARIO["num_minibatches"].default, DRAWN_SEQUENCES // each))
    if is_grpo:
        outcome = simulate_rollouts(scenario_of(arguments, Rollouts))
    else:
        scenario = scenario_of(arguments, Scenario)
        outcome = simulate(scenario).as_json()
    show({"benchmark": "simulate", **outcome}, arguments.json)
    if not (is_grpo or arguments.json):
        print(f"\n{advice(scenario)}")
    return 0
