"""`odc-mpi simulate`: estimate the speed-up of windows over collectives by balancing strategy. Does not use MPI."""

import argparse

from odc_mpi.bench.measure import print_result
from odc_mpi.cli.options import add_scenario, build_scenario
from odc_mpi.errors import UserError
from odc_mpi.simulate.options import LENGTHS, WIRE_BYTES, RolloutOptions, ScenarioOptions, declared_options, option_name

HELP = "estimate the speed-up of balancing strategies; needs no MPI"
#: Default limit on the total number of sequences in all minibatches. Simulating 1,000 ranks then takes ten seconds.
MAX_DEFAULT_SEQUENCES = 16_384
#: Fields whose options are valid only with `--workload grpo`.
GENERATION = tuple(declared_options(RolloutOptions).keys() - declared_options(ScenarioOptions).keys())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi simulate`."""
    parser.description = (
        "Estimate the speed-up of windows over collectives, by balancing strategy. Does not need MPI. Large scenarios "
        "have fewer minibatches by default."
    )
    parser.add_argument("--lengths", metavar="NAME", help=f"{LENGTHS}; default: longalign, for grpo: aime")
    parser.add_argument(
        "--workload", choices=("sft", "grpo"), default="sft", help="grpo: generation and training; default: sft"
    )
    add_scenario(parser, RolloutOptions)
    parser.add_argument("--wire", choices=WIRE_BYTES, help="islands.wire, with --sync-every; default: float32")
    parser.set_defaults(num_minibatches=None, **dict.fromkeys(GENERATION))


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, print the results, and return the exit code."""
    from odc_mpi.simulate.rollouts import RolloutScenario, simulate_rollouts
    from odc_mpi.simulate.scenario import Scenario
    from odc_mpi.simulate.simulate import recommend_batch_size, simulate

    is_grpo = arguments.workload == "grpo"
    for field in GENERATION:
        if getattr(arguments, field) is not None and not is_grpo:
            raise UserError(f"{option_name(field)}: expected --workload grpo, got {arguments.workload}")
    if arguments.num_minibatches is None:
        completions = (arguments.completions or RolloutOptions.completions) if is_grpo else 1
        each = max(1, arguments.ranks * arguments.per_rank * completions)
        arguments.num_minibatches = max(1, min(ScenarioOptions.num_minibatches, MAX_DEFAULT_SEQUENCES // each))
    if is_grpo:
        result = simulate_rollouts(build_scenario(arguments, RolloutScenario))
    else:
        scenario = build_scenario(arguments, Scenario)
        result = simulate(scenario)
    print_result({"benchmark": "simulate", **result}, arguments.json)
    if not (is_grpo or arguments.json):
        print(f"\n{recommend_batch_size(scenario)}")
    return 0
