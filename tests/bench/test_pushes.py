"""What is told of pushes, and which are left out, from seconds made up."""

import numpy as np
import pytest

from odc_mpi.bench.progress.pushes import entry, pattern, too_slow, within


def takes(order, name, *seconds):
    left = list(seconds)

    def sample():
        order.append(name)
        return left.pop(0)

    return sample


def test_ways_take_turns_and_the_slow_one_stops():
    order = []
    samples = {"put": takes(order, "put", 1.0, 1.0, 1.0), "accumulate": takes(order, "accumulate", 6.0, 5.0)}
    assert within(10.0, samples, 3) == {"put": [1.0, 1.0, 1.0], "accumulate": [6.0, 5.0]}
    assert order == ["put", "accumulate", "accumulate", "put", "put"]


def test_each_has_one_sample_however_slow():
    assert within(10.0, {"accumulate": takes([], "accumulate", 31.0)}, 9) == {"accumulate": [31.0]}


def test_where_all_are_left_out_there_are_no_samples():
    assert within(10.0, {}, 9) == {}


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([2.0, 2.0, 2.0], None),
        ([4.0, 4.0, 4.0], "3 of 2M took 12 s, a size has 10 s"),
        ([2.6, 3.0], "one of 8M would take 10.4 s, a size has 10 s"),
        ([2.5, 2.5], None),
    ],
    ids=["fast enough", "took too long", "would take too long", "just fast enough"],
)
def test_a_size_is_left_out_once_a_smaller_one_was_too_slow(times, reason):
    assert too_slow(times, 2 << 20, 8 << 20, 10.0) == reason


def test_figures_are_without_the_first_sample():
    told = entry(10**9, {"put": [9.0, 1.0, 1.0, 1.0], "mailbox": [9.0, 4.0, 2.0, 4.0]}, {"accumulate": "too slow"})
    assert told["size_bytes"] == 10**9
    assert told["left_out"] == {"accumulate": "too slow"}
    assert list(told["variants"]) == ["put", "mailbox"]
    put, mailbox = told["variants"]["put"], told["variants"]["mailbox"]
    assert (put["num_samples"], put["of_put"], put["gb_per_s"]["median"]) == (3, 1.0, 1.0)
    assert (mailbox["seconds"]["median"], mailbox["gb_per_s"]["median"], mailbox["of_put"]) == (4.0, 0.25, 0.25)


def test_a_push_that_was_cut_short_is_compared_with_the_first_puts():
    told = entry(10**9, {"put": [9.0, 1.0, 3.0, 3.0], "accumulate": [40.0, 10.0]}, {})
    assert told["variants"]["accumulate"]["of_put"] == 0.1


def test_the_only_sample_counts_and_without_put_nothing_is_compared():
    told = entry(10**9, {"mailbox": [5.0]}, {"put": "too slow"})
    assert told["variants"]["mailbox"]["num_samples"] == 1
    assert told["variants"]["mailbox"]["of_put"] is None


def test_sums_of_what_is_pushed_are_exact():
    values = pattern(1000)
    assert values.dtype == np.float32 and values.size == 1000
    assert values.min() >= 1 and float(values.max()) * 60_000 < 2**24
    assert not np.array_equal(values[:500], values[500:])
