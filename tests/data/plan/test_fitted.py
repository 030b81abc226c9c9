"""A cost learned from times, by ranks that are simulated in this process."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from length_fixtures import microbatch_cost

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.fitted import MIN_OBSERVATIONS, ROW_LENGTH, FittedCostModel

TRUE = CostModel(linear=2e-5, quadratic=1e-9, constant=0.05)
LENGTHS = np.array([300, 1000, 5000, 20_000, 60_000])


def learn(ranks, true=TRUE, *, minibatches=40, seed=0, outliers=0.01, slowness=None, lengths=None):
    rng = np.random.default_rng(seed)
    for _ in range(minibatches):
        for rank, slow in zip(ranks, slowness or [1.0] * len(ranks), strict=True):
            for _ in range(6):
                lengths_of_microbatch = np.minimum(rng.lognormal(8.5, 1.0, rng.integers(1, 4)), 65_536).astype(int)
                if lengths:
                    lengths_of_microbatch = np.full(1, lengths)
                seconds = slow * microbatch_cost(true, lengths_of_microbatch) * (1 + 0.1 * rng.standard_normal())
                rank.observe(lengths_of_microbatch, seconds * (50 if rng.random() < outliers else 1))
        share(ranks)


def share(ranks):
    reports = np.array([rank.report() for rank in ranks])
    for rank in ranks:
        rank.update(reports)


def errors(cost, true=TRUE):
    """Relative errors at some lengths; only ratios matter, so the mean is taken out."""
    ratios = np.array([microbatch_cost(cost, [length]) / microbatch_cost(true, [length]) for length in LENGTHS])
    return np.abs(ratios / np.exp(np.log(ratios).mean()) - 1)


@pytest.mark.parametrize("prior", [CostModel(), CostModel(6e9, 1e5), CostModel(0.0, 1.0), CostModel(1.0, 1.0, 1.0)])
@pytest.mark.parametrize(
    ("slowness", "seed", "error"),
    [([1.0] * 4, 0, 0.05), ([1.0] * 4, 1, 0.05), ([0.5, 1.0, 1.5, 3.0], 0, 0.1)],
    ids=["equal speeds", "equal speeds, other seed", "different speeds"],
)
def test_recovers_the_cost_from_noise_and_outliers(prior, slowness, seed, error):
    ranks = [FittedCostModel(prior) for _ in range(4)]
    learn(ranks, minibatches=80, seed=seed, slowness=slowness)
    assert errors(ranks[0].cost).max() < 0.05
    expected = np.mean(slowness) * microbatch_cost(TRUE, [5000])
    assert microbatch_cost(ranks[0].cost, [5000]) == pytest.approx(expected, rel=error)


def test_a_slow_rank_with_long_sequences_is_not_taken_for_a_square():
    """One rank sees short sequences, a rank of a third of its speed long ones; some are common to both."""
    rng = np.random.default_rng(0)
    ranks = [FittedCostModel(CostModel()), FittedCostModel(CostModel())]
    true = CostModel(1e-5)
    for _ in range(60):
        for rank, slow, low, high in ((ranks[0], 1.0, 100, 4000), (ranks[1], 3.0, 2000, 60_000)):
            for length in rng.integers(low, high, 8):
                rank.observe([length], slow * microbatch_cost(true, [length]))
        share(ranks)
    assert errors(ranks[0].cost, true).max() < 0.03


def test_forgets_what_is_long_past():
    rank = FittedCostModel(CostModel())
    learn([rank], CostModel(1e-5, 1e-9), minibatches=100)
    learn([rank], CostModel(1e-5, 0.0, 0.2), minibatches=300)
    assert errors(rank.cost, CostModel(1e-5, 0.0, 0.2)).max() < 0.06


def test_the_prior_stands_until_there_is_enough():
    prior = CostModel(3.0, 2.0)
    rank = FittedCostModel(prior)
    share([rank])
    assert rank.report().tolist() == [0.0] * ROW_LENGTH and rank.cost is prior
    for _ in range(MIN_OBSERVATIONS - 1):
        rank.observe([5], 1.0)
    share([rank])
    assert rank.cost is prior
    for _ in range(2):
        rank.observe([5], 1.0)
    share([rank])
    assert rank.cost is not prior


def test_equal_lengths_keep_the_ratios_of_the_prior():
    prior = CostModel(6.0, 3e-4)
    ranks = [FittedCostModel(prior), FittedCostModel(prior)]
    learn(ranks, lengths=8000)
    cost = ranks[0].cost
    assert microbatch_cost(cost, [8000]) == pytest.approx(microbatch_cost(TRUE, [8000]), rel=0.05)
    assert cost.quadratic / cost.linear == pytest.approx(prior.quadratic / prior.linear, rel=0.05)
    assert cost.constant < 0.02 * microbatch_cost(cost, [8000])


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_learns_the_cost_of_chunks(factor):
    ranks, rng = [FittedCostModel(CostModel()) for _ in range(3)], np.random.default_rng(1)
    true, slowness = replace(TRUE, chunk_factor=factor), [0.8, 1.0, 1.3]
    learn(ranks, slowness=slowness)
    for _ in range(30):
        for rank, slow in zip(ranks, slowness, strict=True):
            for begin, end in ((0, 9000), (9000, 13_000)):
                hiccup = 50 if rng.random() < 0.01 else 1
                seconds = hiccup * slow * (true.constant + true.chunk(begin, end)) * (1 + 0.1 * rng.standard_normal())
                rank.observe_chunk(begin, end, seconds)
        share(ranks)
    assert ranks[0].cost.chunk_factor == pytest.approx(factor, abs=0.06)
    assert {rank.cost for rank in ranks} == {ranks[0].cost}
    # It is kept, also by another number of ranks, and the rest of the fit stays.
    other = FittedCostModel(CostModel())
    other.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())))
    assert other.cost == ranks[0].cost and errors(other.cost).max() < 0.05


def test_useless_measurements_are_ignored():
    rank = FittedCostModel(CostModel())
    for lengths, seconds in (([], 1.0), ([5], 0.0), ([5], -1.0), ([5], math.nan), ([5], math.inf)):
        rank.observe(lengths, seconds)
    assert rank.report().tolist() == [0.0] * ROW_LENGTH


def test_no_coefficient_is_negative():
    rng = np.random.default_rng(0)
    for power in (0.0, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0):
        rank = FittedCostModel(CostModel(1.0, 1e-4))
        for _ in range(20):
            for length in rng.integers(100, 60_000, 6):
                rank.observe([length], (length / 1000) ** power)
            share([rank])
        cost = rank.cost
        assert min(cost.constant, cost.linear, cost.quadratic) >= 0
        assert microbatch_cost(cost, [1000]) > 0 and math.isfinite(microbatch_cost(cost, [60_000]))


def test_state_goes_through_json_and_continues():
    whole, resumed = ([FittedCostModel(CostModel()) for _ in range(3)] for _ in range(2))
    learn(whole, minibatches=20)
    for rank in resumed:
        rank.load_state_dict(json.loads(json.dumps(whole[0].state_dict())))
    assert (resumed[0].cost, resumed[0].state_dict()) == (whole[0].cost, whole[0].state_dict())
    for ranks in (whole, resumed):
        learn(ranks, minibatches=5, seed=9, outliers=0.0)
    np.testing.assert_allclose(errors(resumed[0].cost), errors(whole[0].cost), atol=0.01)


def test_what_comes_between_report_and_update_counts_next_time():
    rank = FittedCostModel(CostModel())
    rank.observe([5], 1.0)
    report = rank.report()
    rank.observe([7], 1.0)
    rank.update(report[None])
    assert rank.report()[9] == 1.0
