"""Lengths of completions that are expected of prompts."""

import json

import numpy as np
import pytest

from odc_mpi.training.rl.lengths import CompletionLengthPredictor

PROMPTS = np.array([4, 8, 2, 6, 4], dtype=np.int64)


def test_what_was_generated_last_counts_and_new_prompts_follow_the_others():
    lengths = CompletionLengthPredictor(PROMPTS)
    assert [lengths.predict(i) for i in range(5)] == PROMPTS.tolist()  # nothing is known yet: longer prompts first
    for index, length in ((0, 70.0), (1, 20.004), (0, 12.0)):
        lengths.observe(index, length)
    # Through (4, 12) and (8, 20).
    assert [lengths.predict(i) for i in range(5)] == pytest.approx([12, 20, 8, 16, 12], abs=1e-9)
    again = CompletionLengthPredictor(PROMPTS)
    again.observe(3, 1.0)
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    assert [again.predict(i) for i in range(5)] == [lengths.predict(i) for i in range(5)]
