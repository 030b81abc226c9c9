from dataclasses import replace

import numpy as np
import pytest
from pair_files import write_pairs
from small_run import write_sequences
from user_errors import refused

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.errors import UserError
from odc_mpi.simulate.scenario import KNOWN_DISTRIBUTIONS, REFERENCE_COST, Scenario, lengths_by_name

SCENARIO = Scenario(ranks=4, per_rank=3, num_minibatches=5, speed_variation=0.2, cost_error=0.1)


def test_noise_changes_neither_lengths_nor_the_other_noise():
    plain = replace(SCENARIO, speed_variation=0.0, cost_error=0.0)
    for calm, noisy, slow in zip(
        plain.minibatches(), SCENARIO.minibatches(), replace(SCENARIO, cost_error=0.0).minibatches(), strict=True
    ):
        assert (calm.lengths == noisy.lengths).all()
        assert (calm.speeds == 1).all() and (noisy.speeds == slow.speeds).all()
        assert (calm.sequence_s == REFERENCE_COST.sequence(calm.lengths)).all()
        assert (calm.sequence_s == slow.sequence_s).all() and not (calm.sequence_s == noisy.sequence_s).any()


def test_speeds_and_errors_have_the_mean_and_deviation_asked_for():
    scenario = replace(SCENARIO, ranks=2000, num_minibatches=10)
    minibatches = list(scenario.minibatches())
    speeds = np.concatenate([minibatch.speeds for minibatch in minibatches])
    errors = np.concatenate(
        [minibatch.sequence_s / scenario.cost.sequence(minibatch.lengths) for minibatch in minibatches]
    )
    assert speeds.mean() == pytest.approx(1, abs=0.005) and speeds.std() == pytest.approx(0.2, rel=0.03)
    assert errors.mean() == pytest.approx(1, abs=0.005) and errors.std() == pytest.approx(0.1, rel=0.03)


def test_durations_by_hand():
    speeds = {"num_units": 10, "unit_bytes": 500_000_000, "fetch_gb_per_s": 5.0, "push_gb_per_s": 2.5}
    scenario = Scenario(ranks=2, cost=CostModel(1.0), overhead_s=3.0, **speeds)
    assert scenario.communication_s == pytest.approx(2 * 1.0 + 2.0)
    assert scenario.planned_cost == CostModel(1.0, 0.0, 7.0)
    minibatch = next(scenario.minibatches())
    minibatch = replace(minibatch, sequence_s=np.array([4.0, 9.0]), speeds=np.array([1.0, 0.5]))
    assert minibatch.duration_s(0, (0, 1)) == pytest.approx(20.0)
    assert minibatch.duration_s(1, (0,)) == pytest.approx(18.0)  # communication does not depend on the rank's speed


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"ranks": 10**400}, "--ranks"),
        ({"ranks": 10**5, "per_rank": 10**5}, "at most 10000000 sequences in a minibatch, got 10000000000"),
        ({"seed": -1}, "--seed"),
        ({"overhead_s": 1e308}, "--overhead-s"),
        ({"unit_bytes": 10**8}, "--fetch-gb-per-s or --push-gb-per-s, too"),
        ({"fetch_gb_per_s": 1e-300}, "raise --fetch-gb-per-s"),
        ({"speed_variation": float("nan")}, "--speed-variation"),
        ({"cost_error": float("inf")}, "--cost-error"),
        ({"num_islands": 3}, "--islands: expected a divisor of 8 ranks, got 3"),
        ({"link_gb_per_s": 1.0}, "--link-gb-per-s: expected --islands of 2 or more, got 1: set --islands, too"),
        ({"sync_every": 5}, "--sync-every: expected --islands of 2 or more, got 1: set --islands, too"),
        ({"num_islands": 2, "wire": "int8"}, "--wire: expected --sync-every of 1 or more with int8, got 0: set it"),
        ({"num_islands": 2, "sync_every": 5, "wire": "int4"}, "--wire: expected float32 or ... or e3m0, got int4"),
    ],
)
def test_user_errors_name_the_option(values, option):
    refused(option, Scenario, **values)


@pytest.mark.parametrize(("name", "mean"), [("longalign", 16_500), ("swesmith", 34_700), ("aime", 9_000)])
def test_means_and_limits_are_those_of_the_data_set(name, mean):
    lengths = lengths_by_name(name).sample(200_000, np.random.default_rng(0))
    assert lengths.dtype == np.int64 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.max() == KNOWN_DISTRIBUTIONS[name].max_tokens == lengths_by_name(name).max_tokens
    assert (lengths == lengths.max()).mean() < 0.02


def test_a_data_set_gives_its_own_lengths(tmp_path):
    path = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    assert lengths_by_name(str(path)).max_tokens == 30
    lengths = lengths_by_name(str(path)).sample(3000, np.random.default_rng(0))
    assert set(lengths.tolist()) == {5, 20, 30}
    assert lengths.mean() == pytest.approx(55 / 3, rel=0.05)
    write_pairs(tmp_path / "pairs.h5", [(3, 2, 5), (1, 4, 1)])
    lengths = lengths_by_name(str(tmp_path / "pairs.h5")).sample(100, np.random.default_rng(0))
    assert set(lengths.tolist()) == {10, 6}


@pytest.mark.parametrize(
    ("name", "words"),
    [("longaling", ["did you mean longalign?"]), ("zzz", ["swesmith", "'zzz'"]), ("/nowhere/x.h5", ["/nowhere/x.h5"])],
)
def test_user_errors_are_reported(name, words):
    with pytest.raises(UserError) as caught:
        lengths_by_name(name).sample(1, np.random.default_rng(0))
    assert all(word in str(caught.value) for word in words)


def test_a_damaged_data_set_names_the_option_of_this_command(tmp_path):
    path = tmp_path / "damaged.h5"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="change --lengths") as caught:
        lengths_by_name(str(path))
    assert "data.path" not in str(caught.value)
