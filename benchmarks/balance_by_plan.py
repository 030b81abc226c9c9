"""Compare by plan what `dynamic` takes with what `lb_mini` takes, on equal ranks and on some that differ by 10 %.

    python benchmarks/balance_by_plan.py [--data runs/data/stdlib.h5] [--spreads 0 0.1] [--tails 0 0.1 0.2 0.3]

Draws minibatches of a data set, plans each by both, and adds up costs as `data.cost: flops` estimates them. `--spreads`
and `--tails` stand in for what `data.plan.cut` tries. One process, no MPI.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from odc_mpi.bench.train import own_configuration
from odc_mpi.data.plan import cut
from odc_mpi.data.plan.balance import BALANCES
from odc_mpi.data.plan.cost import Cost
from odc_mpi.train.inputs import open_inputs

#: Sequences of a minibatch, ranks.
SIZES = ((16, 2), (64, 2), (32, 4), (64, 8))
MAX_TOKENS = 1024
SLOWER = 0.1


def compared(all_lengths: np.ndarray, cost: Cost, count: int, size: int, num: int) -> np.ndarray:
    """Return the mean ratios on equal and on other ranks, and the microbatches of a rank under `dynamic`. Local."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(num):
        lengths = all_lengths[rng.choice(len(all_lengths), count, replace=False)]
        plans = {name: BALANCES[name](lengths, size, MAX_TOKENS, cost) for name in ("dynamic", "lb_mini")}
        pool = [cost.microbatch(lengths[list(each)]) for each in plans["dynamic"].pool]
        fixed = np.array(
            [sum(cost.microbatch(lengths[list(each)]) for each in own) for own in plans["lb_mini"].microbatches]
        )
        slowness = 1 + SLOWER * np.linspace(-1, 1, size)
        equal, other = cut.makespan(pool, size), cut.makespan(pool, size, SLOWER)
        rows.append((equal / fixed.max(), other / (fixed * slowness).max(), len(pool) / size))
    return np.mean(rows, axis=0)


def main() -> None:
    """Print a line for each size. Local."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a data set of odc-mpi prepare; default: that of the quick start")
    parser.add_argument("--minibatches", type=int, default=60)
    parser.add_argument("--spreads", type=float, nargs="+", default=cut.SPREADS)
    parser.add_argument("--tails", type=float, nargs="+", default=cut.TAILS)
    given = parser.parse_args()
    cut.SPREADS, cut.TAILS = tuple(given.spreads), tuple(given.tails)
    config = own_configuration(timeout_s=60)
    if given.data:
        config = replace(config, data=replace(config.data, path=str(given.data)))
    inputs = open_inputs(config, rank=0, size=1)
    cost = inputs.sequence_loader.cost
    print(f"{'sequences':>9} {'ranks':>5} {'equal':>7} {'others':>7} {'microbatches':>12}")
    for count, size in SIZES:
        equal, other, each = compared(inputs.dataset.lengths, cost, count, size, given.minibatches)
        print(f"{count:9} {size:5} {equal:7.3f} {other:7.3f} {each:12.2f}")


if __name__ == "__main__":
    main()
