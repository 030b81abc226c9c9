"""Contributions that are left out because of their norms, and changes of norms after which islands synchronize."""

import json
import math

import pytest

from odc_mpi.errors import TrainingError
from odc_mpi.islands.norms import WARM_UP, WINDOW, ChangeRule, NormWatch


def by_island(norms):
    return dict(enumerate(norms))


def warmed_up(num_islands=2, num_fragments=1, limit=10.0):
    watch = NormWatch(num_islands, num_fragments, limit)
    for _ in range(WARM_UP):
        for fragment in range(num_fragments):
            assert watch.check(fragment, by_island([1.0] * num_islands)) == {}
    return watch


def test_a_norm_a_hundred_times_the_mean_is_left_out_and_named():
    watch = warmed_up(num_islands=3)
    assert watch.check(0, by_island([1.0, 100.0, 1.0])) == {1: 100.0}
    assert watch.check(0, by_island([10.0, 1.0, 1.0])) == {}
    # The mean is now 1 + 0.1 * (4 - 1): what was left out has not changed it.
    assert watch.check(0, by_island([1.0, 1.0, 13.1])) == {2: pytest.approx(13.1 / 1.3)}


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_a_norm_that_is_not_finite_is_always_left_out(norm, limit):
    watch = NormWatch(2, 1, limit)
    assert watch.check(0, by_island([norm, 1.0])) == {0: math.inf}
    assert watch.check(0, by_island([norm, norm])) == {0: math.inf, 1: math.inf}
    assert watch.check(0, by_island([2.0, 2.0])) == {}
    # Neither round without a norm counts, nor did the mean change in it.
    assert watch.state_dict() == {"means": [pytest.approx(1.1)], "num_rounds": [2], "num_consecutive": [0, 0]}


def test_the_first_rounds_of_each_fragment_only_set_the_mean():
    watch = NormWatch(2, 2, 10.0)
    for _ in range(WARM_UP - 1):
        watch.check(0, by_island([1.0, 1.0]))
    assert watch.check(0, by_island([1.0, 19.0])) == {}
    assert watch.check(0, by_island([19.0, 19.1])) == {1: pytest.approx(10.05, abs=0.01)}
    assert watch.check(1, by_island([1.0, 100.0])) == {}


def test_a_limit_of_zero_accepts_all_finite_norms():
    assert warmed_up(limit=0.0).check(0, by_island([1.0, 1e30])) == {}


def test_a_mean_of_zero_excludes_nothing():
    watch = NormWatch(2, 1, 10.0)
    for _ in range(WARM_UP + 1):
        assert watch.check(0, by_island([0.0, 0.0])) == {}
    assert watch.check(0, by_island([1.0, 0.0])) == {}


def test_the_third_exclusion_in_a_row_ends_the_run():
    watch = warmed_up(num_fragments=2)
    assert watch.check(0, by_island([1.0, 50.0])) == watch.check(1, by_island([1.0, 50.0])) == {1: 50.0}
    assert watch.check(0, by_island([1.0, 1.0])) == {}
    watch.check(1, by_island([1.0, 50.0]))
    watch.check(0, by_island([1.0, 50.0]))
    with pytest.raises(TrainingError, match=r"island 1 .* 3 synchronizations .* 50 times .* \(islands.norm_limit 10\)"):
        watch.check(1, by_island([1.0, 50.0]))


def test_the_end_for_norms_that_are_not_finite_says_so():
    watch = NormWatch(2, 1, 0.0)
    watch.check(0, by_island([math.nan, 1.0]))
    watch.check(0, by_island([math.inf, math.nan]))
    with pytest.raises(TrainingError, match=r"island 0 .* is not finite: check its hosts"):
        watch.check(0, by_island([math.nan, 1.0]))


def test_a_restored_watch_decides_like_the_saved_one():
    watch = warmed_up(num_fragments=2)
    watch.check(1, by_island([1.0, 50.0]))
    watch.check(0, by_island([1.0, 50.0]))
    restored = NormWatch(2, 2, 10.0)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert restored.state_dict() == watch.state_dict()
    with pytest.raises(TrainingError, match="island 1"):
        restored.check(1, by_island([1.0, 50.0]))
    for other in (NormWatch(3, 2, 10.0), NormWatch(2, 1, 10.0)):
        before = other.state_dict()
        other.load_state_dict(watch.state_dict())
        assert other.state_dict() == before


def test_norms_of_all_islands_above_the_limit_are_a_change_of_training():
    watch = NormWatch(2, 1, 10.0)
    for _ in range(12):
        assert not watch.check(0, by_island([1.0, 1.1]))
    assert not watch.check(0, by_island([20.0, 21.0]))
    assert watch.check(0, by_island([math.inf, 40.0])) == {0: math.inf}


#: Share of the latest and of the oldest norm in a full window: 1 and 0.99 ** 24 of (1 - 0.99 ** 25) / 0.01.
LATEST, OLDEST = 0.0450087, 0.0353624


def filled_rule(threshold):
    """Rule after the first steps, all with the norm 1."""
    rule = ChangeRule(threshold)
    assert all(rule.update(1.0) for _ in range(WINDOW))
    return rule


@pytest.mark.parametrize(("norm", "change"), [(3.0, 2 * LATEST), (0.5, 0.5 * LATEST)])
def test_a_change_by_the_threshold_triggers(norm, change):
    assert filled_rule(change - 1e-6).update(norm) and not filled_rule(change + 1e-6).update(norm)


def test_the_mean_before_the_step_is_the_divisor():
    # The mean is 1 + 2 * LATEST = 1.0900174, then 1 + LATEST * (2 * 0.99 + 1) = 1.1341259, 1.0404659 times as much.
    decisions = []
    for threshold in (0.040465, 0.040467):
        rule = filled_rule(threshold)
        rule.update(3.0)
        decisions.append(rule.update(2.0))
    assert decisions == [True, False]


def test_norms_leave_the_window():
    # The outlier's last contribution to the mean, 2 * OLDEST, is gone 25 steps after it came.
    rule = filled_rule(2 * OLDEST / (1 + 2 * OLDEST) - 1e-6)
    assert rule.update(3.0)
    assert [rule.update(1.0) for _ in range(WINDOW + 1)] == [False] * (WINDOW - 1) + [True, False]


def test_norms_that_are_not_finite_are_ignored():
    rule = filled_rule(1e-9)
    assert not rule.update(math.nan) and not rule.update(math.inf)
    assert rule.state_dict()["norms"] == [1.0] * WINDOW
    assert rule.update(2.0)
    rule = ChangeRule(0.5)
    assert all(rule.update(math.nan) for _ in range(WINDOW))
    assert not rule.update(math.nan)


def test_a_mean_of_zero_changes_only_by_a_norm():
    rule = ChangeRule(0.5)
    for _ in range(WINDOW):
        rule.update(0.0)
    assert not rule.update(0.0)
    assert rule.update(1.0)


def test_a_restored_rule_goes_on():
    rule = ChangeRule(0.05)
    for step in range(WINDOW + 3):
        rule.update(1.0 + step % 3)
    restored = ChangeRule(0.05)
    restored.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    decisions = [(rule.update(norm), restored.update(norm)) for norm in (9.0, 2.0, 1.0, 0.1)]
    assert decisions[0] == (True, True)
    assert all(kept == again for kept, again in decisions)
