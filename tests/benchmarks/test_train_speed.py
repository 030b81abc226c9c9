"""When losses count as the same."""

import math

import pytest
from train_speed import TOLERANCE, Round, agreement, deviation
from user_errors import refused

from odc_mpi.errors import AllRanksUserError


def rounds(*losses):
    return [Round(1.0, 10, list(losses[:1])), Round(1.0, 10, list(losses[1:]))]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_infinitely_far_off(bad):
    good = rounds(2.0, 4.0, 1.0)
    for position in range(3):
        losses = [2.0, 4.0, 1.0]
        losses[position] = bad
        assert deviation(rounds(*losses), good) == deviation(good, rounds(*losses)) == math.inf
        assert deviation(rounds(*losses), rounds(*losses)) == math.inf


def test_contenders_that_do_not_agree_are_named():
    all_rounds = {"plain": rounds(2.0, 4.0, 1.0), "near": rounds(2.0, 4.016, 1.0), "far": rounds(2.0, 4.0, 1.02)}
    assert agreement(all_rounds, "plain", 0.03) == pytest.approx({"plain": 0.0, "near": 0.004, "far": 0.02})
    assert agreement({**all_rounds, "near": rounds(2.0, 4.0, 1 + 4e-7), "far": all_rounds["plain"]}, "plain", TOLERANCE)
    refused(
        "differ by 0.0001 ",
        agreement,
        {**all_rounds, "near": rounds(2.0, 4.0, 1 + 1e-4), "far": all_rounds["plain"]},
        "plain",
        TOLERANCE,
        error=AllRanksUserError,
    )
    refused("of far and plain differ by 0.02", agreement, all_rounds, "plain", 0.005, error=AllRanksUserError)
    refused(
        "a loss of near or plain is not finite",
        agreement,
        {**all_rounds, "near": rounds(2.0, math.nan, 1.0)},
        "plain",
        0.03,
        error=AllRanksUserError,
    )
