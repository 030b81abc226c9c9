"""A short form of `make soak`."""

import pytest
from soak import MINIBATCHES_PER_LIFE, soak

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_gradient_is_the_exact_sum(world, reduction, seed):
    assert soak(world, MINIBATCHES_PER_LIFE // 2, seed, (reduction,)) > 0
