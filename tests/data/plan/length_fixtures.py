"""Lengths and costs that several test modules plan with."""

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.cost import CostModel

COST = CostModel(1.0, 1e-3)


def microbatch_cost(cost: CostModel, lengths: npt.ArrayLike) -> float:
    return cost.constant + float(cost.sequence(lengths).sum())


def lognormal_lengths(rng: np.random.Generator, n: int, max_tokens: int = 4096) -> np.ndarray:
    return np.minimum(rng.lognormal(6.0, 1.0, n).astype(np.int64) + 1, max_tokens)
