"""Lengths of completions that are expected of prompts."""

import numpy as np
import pytest

from odc_mpi.training.rl.prompts import predict_lengths

PROMPTS = np.array([4, 8, 2, 6, 4], dtype=np.int64)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ({}, [4, 8, 2, 6, 4]),  # nothing is known yet: longer prompts first
        ({0: 7.0, 4: 9.0}, [7, 8, 2, 6, 9]),  # all observed prompts have one length: no line
        ({0: 12.0, 1: 20.0}, [12, 20, 8, 16, 12]),
    ],
)
def test_new_prompts_follow_the_observed_ones(observed, expected):
    assert predict_lengths(range(5), PROMPTS, observed) == pytest.approx(expected, abs=1e-9)
    assert predict_lengths(range(5), PROMPTS, dict(reversed(observed.items()))) == predict_lengths(
        range(5), PROMPTS, observed
    )
