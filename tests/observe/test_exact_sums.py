"""Sums of values that callbacks gather."""

import math
import random

import pytest

from odc_mpi.observe.callback import round_for_exact_sum


@pytest.mark.parametrize("most", [1.0, 256.0, 3e9, 1e-3])
def test_sums_do_not_depend_on_their_order(most: float) -> None:
    draw = random.Random(2)
    numbers = [most * draw.uniform(-1, 1) * 10 ** draw.uniform(-9, 0) for _ in range(1000)]
    rounded = [round_for_exact_sum(number, most) for number in numbers]
    assert max(abs(a - b) for a, b in zip(numbers, rounded, strict=True)) <= most * 2.0**-44
    sums, before = set(), set()
    for _ in range(20):
        draw.shuffle(rounded)
        draw.shuffle(numbers)
        # In parts, as ranks have them.
        position = draw.randrange(1000)
        sums.add(sum(rounded[:position]) + sum(rounded[position:]))
        before.add(sum(numbers[:position]) + sum(numbers[position:]))
    assert sums == {math.fsum(rounded)}
    assert len(before) > 1, "sums of these do not depend on their order anyway"


def test_values_that_are_not_finite_do_not_change() -> None:
    assert round_for_exact_sum(math.inf, 1.0) == math.inf
    assert math.isnan(round_for_exact_sum(math.nan, 1.0))
