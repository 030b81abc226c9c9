"""When losses count as the same."""

import math

import pytest

from odc_mpi.bench.train import TOLERANCE, Round, _deviation


def rounds(*losses):
    return [Round(1.0, 10, list(losses[:1])), Round(1.0, 10, list(losses[1:]))]


def test_the_largest_difference_counts():
    assert _deviation(rounds(2.0, 4.0, 1.0), rounds(2.0, 4.0, 1.0)) == 0.0
    assert _deviation(rounds(2.0, 4.0, 1.0), rounds(2.0, 5.0, 1.0)) == pytest.approx(0.2)
    assert _deviation(rounds(2.0, 4.0, 1 + 4e-7), rounds(2.0, 4.0, 1.0)) < TOLERANCE
    assert _deviation(rounds(2.0, 4.0, 1 + 1e-4), rounds(2.0, 4.0, 1.0)) > TOLERANCE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_as_far_off_as_can_be(bad):
    good = rounds(2.0, 4.0, 1.0)
    for place in range(3):
        losses = [2.0, 4.0, 1.0]
        losses[place] = bad
        assert _deviation(rounds(*losses), good) == _deviation(good, rounds(*losses)) == math.inf
        assert _deviation(rounds(*losses), rounds(*losses)) == math.inf


def test_losses_of_zero():
    assert _deviation(rounds(0.0, 0.0, 0.0), rounds(0.0, 0.0, 0.0)) == 0.0
    assert TOLERANCE < _deviation(rounds(0.0, 1e-3, 0.0), rounds(0.0, 0.0, 0.0)) < math.inf
