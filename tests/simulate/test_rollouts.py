"""Simulated generation and training of one minibatch: figures by hand, and bounds."""

import numpy as np
import pytest

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.simulate.rollouts import (
    BASELINE,
    BOUND,
    SCHEDULES,
    SHARES,
    RolloutScenario,
    SimulatedRollouts,
    _simulate_schedule,
    simulate_rollouts,
)
from odc_mpi.simulate.scenario import SimulatedMinibatch

SMALL = RolloutScenario(ranks=3, per_rank=2, num_minibatches=3, speed_variation=0.2, completions=4)


def by_hand(lengths, speeds):
    """Two ranks with a prompt each; a decode step takes 1 s and 0.5 s a sequence, a sequence 1 s to train."""
    decode = {"completions": 2, "decode_step_s": 1.0, "decode_sequence_s": 0.5}
    rollouts = RolloutScenario(ranks=2, per_rank=1, lengths="equal", cost=CostModel(0.0, 0.0, 0.0), **decode)
    minibatch = SimulatedMinibatch(rollouts, np.array(lengths), np.ones(len(lengths)), np.array(speeds, dtype=float))
    return SimulatedRollouts(rollouts, minibatch)


def test_decoding_by_hand():
    # Lengths 2 and 4: two steps of 2 s, then two of 1.5 s; lengths 1 and 6: one of 2 s, five of 1.5 s, on half the
    # speed.
    minibatch = by_hand([2, 4, 1, 6], [1.0, 0.5])
    assert minibatch.assigned_decode_ends_s == [[(7.0, 0)], [(19.0, 1)]]
    # Both on one rank: 1, 2, 4, 6 with 4, 3, 2, 1 sequences left: 3 + 2.5 + 2 * 2 + 2 * 1.5.
    assert minibatch.decode_ends_s(0, [1, 0]) == [(9.5, 0), (12.5, 1)]


def test_bounds_by_hand():
    minibatch = by_hand([2, 4, 1, 6], [1.0, 0.5])
    longest, shared = minibatch.bounds_s()
    assert longest == pytest.approx(19.0 + 1.0) and shared == pytest.approx((7.0 + 9.5 + 4.0) / 1.5)


def test_every_completion_is_trained_once():
    for minibatch in (SimulatedRollouts(SMALL, each) for each in SMALL.minibatches()):
        count = SMALL.num_groups * SMALL.completions
        assert len(minibatch.minibatch.lengths) == count
        decoded = [group for ends in minibatch.assigned_decode_ends_s for _, group in ends]
        assert sorted(decoded) == list(range(SMALL.num_groups))
        shares = [minibatch.shares(g) for g in range(SMALL.num_groups)]
        assert all(len(of_group) == SHARES for of_group in shares)
        packs = [own for of_group in shares for share in of_group for own in share]
        assert sorted(i for own in packs for i in own) == list(range(count))
        assert all(minibatch.minibatch.lengths[list(own)].sum() <= SMALL.max_tokens for own in packs)


def test_training_by_hand():
    minibatch = by_hand([2, 4, 1, 6], [1.0, 0.5])
    ends = {name: _simulate_schedule(minibatch, name).end_s for name in SCHEDULES}
    # Rank 0 trains its completions from 7 to 9. At 19 it takes one of the other two; rank 1 trains the last in 2 s.
    assert ends["window/on_demand"] == 21.0
    assert ends["window/barrier"] == 19.0 + 2 / 0.5, "a microbatch of two for each"


def test_nothing_beats_the_bound_and_sharing_wins():
    outcome = simulate_rollouts(RolloutScenario(num_minibatches=6, speed_variation=0.1))
    assert set(outcome["speedup"]) == set(outcome["idle_fraction"]) == {*SCHEDULES, BOUND}
    speedup = outcome["speedup"]
    assert speedup[BASELINE] == 1.0 and speedup[BOUND] == max(speedup.values())
    assert speedup["window/on_demand"] > 1.13 and speedup["window/on_demand"] > 0.97 * speedup[BOUND]
    assert 1.0 < speedup["window/barrier"] < speedup["window/on_demand"]
    assert outcome["idle_fraction"][BASELINE] == pytest.approx(0.14, abs=0.03)
    assert 0.4 < outcome["generation_fraction"] < 0.75
    for name, ranks in outcome["timeline"].items():
        for own in ranks:
            edges = [second for span in own for second in span]
            assert edges == sorted(edges) and edges[0] == 0.0, name
