"""The metrics of islands that train apart are combined."""

import pytest

from odc_mpi.islands.run_dir import ISLANDS, combine_metrics, current_islands, write_size


def line(step, **metrics):
    return {"step": step, "step_s": 1.0, "skipped": False, **metrics}


def test_tokens_are_added_and_losses_are_means_over_tokens():
    first = line(1, loss=2.0, num_tokens=1, tokens_per_s=10.0, eval_loss=4.0, peak_host_bytes=3, microbatches_min=2)
    second = line(1, loss=5.0, num_tokens=2, tokens_per_s=20.0, eval_loss=5.0, peak_host_bytes=7, microbatches_min=1)
    second |= {"skipped": True, "step_s": 3.0, "slowest_rank": 1, "grad_norm": None}
    [combined] = combine_metrics([[first], [second]])
    assert combined == {
        "step": 1,
        "step_s": 2.0,
        "skipped": True,
        "loss": 4.0,
        "num_tokens": 3,
        "tokens_per_s": 30.0,
        "eval_loss": 4.5,
        "peak_host_bytes": 7,
        "microbatches_min": 1,
        "grad_norm": None,
    }


def test_steps_end_with_those_of_the_slowest_island():
    islands = [[line(step, loss=float(step)) for step in steps] for steps in ((1, 2, 3), (1, 2), (2,))]
    assert [(each["step"], each["loss"]) for each in combine_metrics(islands)] == [(1, 1.0), (2, 2.0)]
    assert combine_metrics([*islands, []]) == combine_metrics([]) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_islands_of_an_earlier_start_with_more_islands_are_left_out(tmp_path, size):
    assert current_islands(tmp_path) == []
    for index in range(11):
        (tmp_path / ISLANDS / str(index)).mkdir(parents=True)
    write_size(tmp_path, size)
    assert [path.name for path in current_islands(tmp_path)] == [str(index) for index in range(size)]
