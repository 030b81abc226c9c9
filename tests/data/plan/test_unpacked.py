"""Plans with one sequence per microbatch: complete, balanced, and costliest first."""

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths

from odc_mpi.data.plan.balance import BALANCE_STRATEGIES
from odc_mpi.data.plan.unpacked import one_sequence_per_microbatch
from odc_mpi.errors import UserError


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_sequence_is_a_microbatch(name, size):
    for n in (0, 1, 3, 40):
        lengths = lognormal_lengths(np.random.default_rng(n), n)
        plan = one_sequence_per_microbatch(name, COST)(lengths, size, 4096, COST)
        packs = [*(pack for microbatches in plan.microbatches for pack in microbatches if pack), *plan.pool]
        assert sorted(packs) == [(i,) for i in range(n)]
        assert len(plan.microbatches) == size
        assert bool(plan.pool) == (name == "dynamic" and n > 0)
        for microbatches in (*plan.microbatches, plan.pool):
            costs = [float(COST.sequence(lengths[i])) for (i,) in filter(None, microbatches)]
            assert costs == sorted(costs, reverse=True)
        if name == "lb_micro":
            assert len({len(microbatches) for microbatches in plan.microbatches}) == 1


def test_ranks_are_balanced_by_cost():
    plan = one_sequence_per_microbatch("lb_mini", COST)(np.array([8, 1, 4, 3]), 2, 10, COST)
    assert plan.microbatches == (((0,),), ((2,), (3,), (1,)))


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(UserError, match="max_tokens_per_microbatch"):
        one_sequence_per_microbatch("dynamic", COST)(np.array([11]), 2, 10, COST)
