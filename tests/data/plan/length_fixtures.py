"""Lengths and costs that several test modules plan with."""

import numpy as np

from odc_mpi.data.plan.cost import CostModel

COST = CostModel(1.0, 1e-3)


def microbatch_cost(cost, lengths):
    return cost.constant + float(cost.sequence(lengths).sum())


def lognormal_lengths(rng, n, max_tokens=4096):
    return np.minimum(rng.lognormal(6.0, 1.0, n).astype(np.int64) + 1, max_tokens)
