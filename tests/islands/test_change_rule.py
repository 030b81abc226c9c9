import json
import math

from odc_mpi.islands.change_rule import WINDOW, ChangeRule

#: Share of the latest and of the oldest norm in a full window: 1 and 0.99 ** 24 of (1 - 0.99 ** 25) / 0.01.
LATEST, OLDEST = 0.0450087, 0.0353624


def filled_rule(threshold, num_islands=2):
    """Rule after the first steps, all with the norm 1."""
    rule = ChangeRule(num_islands, threshold)
    assert all(rule.update([1.0] * num_islands) for _ in range(WINDOW))
    return rule


def is_triggered_by(norms, change):
    """Whether a step with these norms after equal ones changes the mean by this fraction, from both sides."""
    return filled_rule(change - 1e-6).update(norms) and not filled_rule(change + 1e-6).update(norms)


def test_the_change_of_one_island_suffices():
    assert is_triggered_by([1.0, 3.0], 2 * LATEST)
    assert is_triggered_by([0.5, 1.0], 0.5 * LATEST)
    assert is_triggered_by([0.5, 3.0], 2 * LATEST)


def test_the_mean_before_the_step_is_the_divisor():
    # The mean is 1 + 2 * LATEST = 1.0900174, then 1 + LATEST * (2 * 0.99 + 1) = 1.1341259, 1.0404659 times as much.
    decisions = []
    for threshold in (0.040465, 0.040467):
        rule = filled_rule(threshold, num_islands=1)
        rule.update([3.0])
        decisions.append(rule.update([2.0]))
    assert decisions == [True, False]


def test_norms_leave_the_window():
    # The outlier's last share in the mean, 2 * OLDEST, is gone 25 steps after it came.
    rule = filled_rule(2 * OLDEST / (1 + 2 * OLDEST) - 1e-6, num_islands=1)
    assert rule.update([3.0])
    assert [rule.update([1.0]) for _ in range(WINDOW + 1)] == [False] * (WINDOW - 1) + [True, False]


def test_norms_that_are_not_finite_are_ignored():
    rule = filled_rule(1e-9)
    assert not rule.update([math.nan, math.inf])
    assert rule.state_dict()["norms"] == [[1.0] * WINDOW] * 2
    assert not rule.update([math.nan, 1.0])
    assert rule.update([math.nan, 2.0])
    rule = ChangeRule(1, 0.5)
    assert all(rule.update([math.nan]) for _ in range(WINDOW))
    assert not rule.update([math.nan])


def test_thresholds_at_the_ends():
    always, never = filled_rule(0.0), filled_rule(1e9)
    for norm in (1.0, 1.0, 100.0):
        assert always.update([norm, norm])
        assert not never.update([norm, norm])


def test_a_mean_of_zero_changes_only_by_a_norm():
    rule = ChangeRule(1, 0.5)
    for _ in range(WINDOW):
        rule.update([0.0])
    assert not rule.update([0.0])
    assert rule.update([1.0])


def test_a_restored_rule_goes_on():
    rule = ChangeRule(2, 0.05)
    for step in range(WINDOW + 3):
        rule.update([1.0 + step % 3, 2.0])
    restored = ChangeRule(2, 0.05)
    restored.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    decisions = [(rule.update([norm, 2.0]), restored.update([norm, 2.0])) for norm in (9.0, 2.0, 1.0, 0.1)]
    assert decisions[0] == (True, True)
    assert all(kept == again for kept, again in decisions)
    other = ChangeRule(3, 0.05)
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == ChangeRule(3, 0.05).state_dict()
