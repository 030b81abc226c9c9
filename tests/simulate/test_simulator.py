"""Scenarios; the simulator against figures found by hand, and known bounds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pair_files import write_pairs
from small_run import write_sequences
from user_errors import refused

from odc_mpi.cli import main as cli
from odc_mpi.data.plan.balance import Plan, SequenceSplit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.errors import UserError
from odc_mpi.simulate.events import (
    SimulatedTiming,
    merge_intervals,
    simulate_collective,
    simulate_context_parallel,
    simulate_dynamic,
    simulate_static,
)
from odc_mpi.simulate.scenario import KNOWN_DISTRIBUTIONS, REFERENCE_COST, Scenario, SimulatedMinibatch, lengths_by_name
from odc_mpi.simulate.simulate import SCHEDULES, floor_s, plan, simulate, simulate_timing

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
        ({"num_islands": 2, "sync_every": 5, "wire": "int4"}, "--wire: expected float32 or ... or topk, got int4"),
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


#: Schedules that do not split sequences.
WHOLE = [name for name in SCHEDULES if name != "window/split"]
NOISY = Scenario(ranks=4, per_rank=5, num_minibatches=4, speed_variation=0.2, cost_error=0.1)


def test_chunks_wait_for_each_other_in_each_unit_by_hand():
    # Three seconds in one unit: one forward, two backward. The second is twice as slow, so the first waits at the end.
    assert simulate_context_parallel([0.0, 0.0], [3.0, 6.0], 1) == [[(0.0, 1.0), (1.0, 3.0)], [(0.0, 2.0), (2.0, 6.0)]]
    # A first chunk that is late delays the second in forward; a second, the first in backward.
    assert simulate_context_parallel([2.0, 0.0], [3.0, 3.0], 1) == [[(2.0, 3.0), (3.0, 5.0)]] * 2
    first, second = simulate_context_parallel([0.0, 4.0], [6.0, 6.0], 2)
    assert [b for _, b in first] == [1.0, 2.0, 4.0, 10.0], "its last unit begins when the other has left one"
    assert [b for _, b in second] == [5.0, 6.0, 8.0, 10.0]
    # Without waiting, units are all that they are.
    assert simulate_context_parallel([1.0], [4.0], 3)[0][-1][1] == pytest.approx(5.0)


def test_chunks_are_timed_by_hand():
    cost = CostModel(1.0, chunk_factor=1.5)
    minibatch = make_minibatch([20, 4], [1.0, 0.5], overhead_s=2.0, cost=cost, num_units=1)
    minibatch = replace(minibatch, lengths=np.array([20, 4]))
    split = SequenceSplit(0, (0, 12, 20), (1, 0))
    assert minibatch.chunk_s(1, split, 0, is_first=True) == pytest.approx((2 + 1.5 * 12) / 0.5)
    assert minibatch.chunk_s(0, split, 1, is_first=True) == pytest.approx(2 + 1.5 * 8)
    # As one unit: rank 1 takes 40, rank 0 14, and draws the other sequence, 6 more.
    one_split = Plan(((), ()), ((1,),), (split,))
    found = simulate_timing(minibatch, one_split, "window")
    assert busy_s(found) == pytest.approx(60.0) and found.end_s == pytest.approx(40.0)
    minibatch = replace(minibatch, scenario=replace(minibatch.scenario, num_units=3))
    assert len(simulate_timing(minibatch, one_split, "window").timeline[1]) == 2 * 3


def busy_s(found):
    return sum(ended - began for local in found.timeline for began, ended in local)


def test_timelines_by_hand():
    # In turns: max(3, 1) + max(2, 4) + max(1, dummy 0.5).
    found = simulate_collective([[3.0, 2.0, 1.0], [1.0, 4.0]], [0.2, 0.5])
    assert found == SimulatedTiming(8.0, [[(0.0, 3.0), (3.0, 5.0), (7.0, 8.0)], [(0.0, 1.0), (3.0, 7.0)]])
    # An empty one is run, and can be the slowest.
    assert simulate_collective([[1.0], [0.0]], [2.0, 2.0]) == SimulatedTiming(2.0, [[(0.0, 1.0)], []])
    found = simulate_static([[3.0, 0.0, 1.0], [1.0, 4.0], []])
    assert found == SimulatedTiming(5.0, [[(0.0, 3.0), (3.0, 4.0)], [(0.0, 1.0), (1.0, 5.0)], []])
    work = [5.0, 3.0, 3.0, 2.0, 1.0]
    found = simulate_dynamic(5, [0.0] * 2, lambda rank, k: work[k])
    assert found == SimulatedTiming(7.0, [[(0.0, 5.0), (5.0, 7.0)], [(0.0, 3.0), (3.0, 6.0), (6.0, 7.0)]])
    # Rank 1 is half as fast.
    found = simulate_dynamic(5, [0.0] * 2, lambda rank, k: work[k] * (1 + rank))
    assert found == SimulatedTiming(10.0, [[(0.0, 5.0), (5.0, 8.0), (8.0, 9.0)], [(0.0, 6.0), (6.0, 10.0)]])
    assert merge_intervals([(0.0, 1.0), (1.4, 2.0), (2.5, 3.0)], gap_s=0.5) == [(0.0, 2.0), (2.5, 3.0)]
    assert merge_intervals([], gap_s=0.5) == []


def test_timelines_hold_all_work_of_the_first_minibatch():
    scenario = replace(NOISY, num_units=4, overhead_s=0.5)
    outcome = simulate(replace(scenario, num_minibatches=1))
    assert set(outcome["timeline"]) == set(outcome["idle_per_rank"]) == set(SCHEDULES)
    for name, ranks in outcome["timeline"].items():
        busy = sum(ended - began for local in ranks for began, ended in local)
        idle = outcome["idle_fraction"][name]
        assert busy == pytest.approx((1 - idle) * scenario.ranks * outcome["step_s"][name], rel=1e-3)
        assert max(local[-1][1] for local in ranks if local) <= outcome["step_s"][name] * (1 + 1e-9)
        idle_of_ranks = outcome["idle_per_rank"][name]
        assert len(idle_of_ranks) == scenario.ranks and min(idle_of_ranks) >= 0
        assert np.mean(idle_of_ranks) == pytest.approx(idle, abs=1e-9)
    assert simulate(replace(scenario, num_minibatches=2))["timeline"] == outcome["timeline"]


def make_minibatch(sequence_s, speeds, **options):
    """Return a minibatch with six seconds for a microbatch of as many tokens as possible."""
    scenario, times = Scenario(ranks=len(speeds), lengths="equal", **options), np.array(sequence_s, dtype=float)
    lengths = (times * scenario.max_tokens / 6).astype(np.int64)
    return SimulatedMinibatch(scenario, lengths, times, np.array(speeds, dtype=float))


def test_plans_are_timed_by_hand():
    pushes = {"num_units": 1, "unit_bytes": 10**9, "push_gb_per_s": 2.0}  # half a second
    minibatch = make_minibatch([6, 2, 3, 1], [1.0, 0.5], overhead_s=1.0, **pushes)
    fixed = Plan((((0,), ()), ((1, 2), (3,))))
    # Rank 0: 7 + 0.5; rank 1: 6 / 0.5 + 0.5 and 2 / 0.5 + 0.5.
    assert simulate_timing(minibatch, fixed, "window").end_s == pytest.approx(12.5 + 4.5)
    assert simulate_timing(minibatch, fixed, "collective").end_s == pytest.approx(12.5 + 4.5)
    assert busy_s(simulate_timing(minibatch, fixed, "window")) == pytest.approx(7.5 + 17.0)
    # 7.5 and 3.5 beside 4.5 and 8.5: in turns each waits for the other once.
    crossed = Plan((((0,), (1,)), ((3,), (2,))))
    assert simulate_timing(minibatch, crossed, "window").end_s == pytest.approx(4.5 + 8.5)
    assert simulate_timing(minibatch, crossed, "collective").end_s == pytest.approx(7.5 + 8.5)
    pool = Plan(((), ()), pool=((0,), (2,), (1,), (3,)))
    # Rank 0: 7.5, then 3.5 (11), then 2.5 (13.5); rank 1: 4 / 0.5 + 0.5 = 8.5, then 4.5 (13).
    minibatch = replace(minibatch, speeds=np.array([1.0, 0.5]))
    assert simulate_timing(minibatch, pool, "window").end_s == pytest.approx(13.0)


def test_the_floor_by_hand():
    minibatch = make_minibatch([6, 2, 3, 1], [1.0, 0.5], overhead_s=1.0)
    longest, shared = floor_s(minibatch)
    assert longest == 7.0
    assert shared == pytest.approx((12 + 2) / 1.5)  # two microbatches


@pytest.mark.parametrize("scenario", [NOISY, replace(NOISY, ranks=7, overhead_s=0.5)])
def test_windows_never_lose_to_collectives_and_nothing_beats_the_floor(scenario):
    for minibatch in scenario.minibatches():
        floors = floor_s(minibatch)
        for name in SCHEDULES:
            transport, balance = name.split("/")
            planned = plan(minibatch, balance)
            end = simulate_timing(minibatch, planned, transport).end_s
            assert end >= (max(floors) if name in WHOLE else floors[1]) * (1 - 1e-9), name
            if transport == "collective":
                assert simulate_timing(minibatch, planned, "window").end_s <= end * (1 + 1e-9)


def test_outcomes_repeat_and_depend_on_the_seed():
    one, same, other = simulate(NOISY), simulate(NOISY), simulate(replace(NOISY, seed=1))
    assert one == same
    assert one["speedup"] != other["speedup"]
    assert one["speedup"]["collective/lb_micro"] == 1.0
    assert set(one["speedup"]) == set(one["idle_fraction"]) == {*SCHEDULES, "floor", "even_share"}
    assert all(0 <= idle < 1 for idle in one["idle_fraction"].values())
    assert one["floor"] == max(one["speedup"][name] for name in (*WHOLE, "floor"))
    assert one["speedup"]["even_share"] == max(one["speedup"].values())


def test_islands_fetch_at_the_speed_of_a_node_and_exchange_at_that_of_the_link():
    """Two islands of two ranks; each rank has one sequence of 3 s. A model of 1 GB crosses the link in 10 s."""
    flat = Scenario(
        ranks=4, per_rank=1, lengths="equal", num_units=10, unit_bytes=10**8, fetch_gb_per_s=2.0, push_gb_per_s=1.0,
        num_islands=2, link_gb_per_s=0.1,
    )  # fmt: skip
    # Half of a fetch or push comes from the own island.
    assert flat.communication_s == pytest.approx(2 * (0.25 + 5) + 0.5 + 5)
    assert flat.exchange_s == pytest.approx(2 * 10 / 4)
    inside = flat.in_island
    assert inside.communication_s == pytest.approx(2 * 0.5 + 1)
    result = simulate(replace(flat, num_minibatches=1))
    assert set(result["speedup"]) == {*SCHEDULES, "islands/lb_mini", "islands/dynamic", "floor", "even_share"}
    difference = result["step_s"]["window/lb_mini"] - result["step_s"]["islands/lb_mini"]
    assert difference == pytest.approx(flat.communication_s - inside.communication_s - flat.exchange_s)
    # Once in five steps, a rank receives the other island's half of 500 million parameters, encoded.
    outer = replace(flat, num_minibatches=1, sync_every=5, wire="int8")
    assert outer.outer_exchange_s == pytest.approx(2.5e8 * (1 + 1 / 32) / 1e8 / 5)
    assert replace(outer, num_islands=4).outer_exchange_s == pytest.approx(6 * outer.outer_exchange_s)
    synced = simulate(outer)
    assert synced["step_s"].items() >= result["step_s"].items()
    difference = synced["step_s"]["outer/lb_mini"] - synced["step_s"]["islands/lb_mini"]
    assert difference == pytest.approx(outer.outer_exchange_s - flat.exchange_s)
    free = replace(flat, fetch_gb_per_s=0.0, push_gb_per_s=0.0)
    assert free.in_island.communication_s == pytest.approx(0.0, abs=1e-5)


def test_gain_of_a_cache():
    """A rank that caches the full model pays one fetch and one push of it per minibatch, whatever it runs."""
    lengths = np.full(8, 1000)
    free = Scenario(ranks=2, per_rank=4, lengths="equal")
    slow = replace(free, num_units=10, unit_bytes=10**8, fetch_gb_per_s=2.0, push_gb_per_s=1.0)
    kept = replace(slow, parameter_cache_bytes=10**9, gradient_cache_bytes=10**10)
    half = replace(slow, parameter_cache_bytes=5 * 10**8, gradient_cache_bytes=5 * 10**8)
    assert (
        slow.cache_saving_s == (0.0, 0.0) and half.cache_saving_s == (1.0, 0.75) and kept.cache_saving_s == (2.0, 1.5)
    )

    def ends(scenario, transport, balance):
        minibatch = next(scenario.minibatches())
        minibatch = replace(minibatch, lengths=lengths, sequence_s=np.full(8, 3.0))
        pool = tuple((i,) for i in range(8))
        plan = Plan(((), ()), pool) if balance == "dynamic" else Plan((pool[:4], (*pool[4:7], ())), ())
        return simulate_timing(minibatch, plan, transport).end_s

    for balance in ("lb_mini", "dynamic"):
        of_each = [ends(scenario, "window", balance) for scenario in (free, slow, half, kept)]
        assert of_each == pytest.approx([12.0, 4 * 5.0, 4 * 4.0 + 0.75, 12.0 + 1.5])
    assert ends(kept, "collective", "lb_mini") == ends(slow, "collective", "lb_mini") == 20.0
    found = [simulate(replace(scenario, num_minibatches=3)) for scenario in (slow, half, kept)]
    speedups = [outcome["speedup"]["window/dynamic"] for outcome in found]
    assert speedups == sorted(speedups) and len(set(speedups)) == 3
    assert all(max(outcome["speedup"].values()) == outcome["speedup"]["even_share"] for outcome in found)


def test_the_command_prints_one_object_and_draws_the_default_number_of_minibatches(capsys):
    assert cli.main(["simulate", "--lengths", "equal", "--ranks", "100", "--per-rank", "10", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["scenario"]["num_minibatches"] == 16 and result["scenario"]["ranks"] == 100
    assert set(result["idle_fraction"]) == set(result["speedup"])


def test_the_command_prints_tables(capsys):
    assert cli.main(["simulate", "--per-rank", "4", "--minibatches", "2"]) == 0
    said = capsys.readouterr().out
    words = ("window/dynamic", "window/split", "even_share", "it is the longest sequence")
    assert [each for each in words if each not in said] == []
