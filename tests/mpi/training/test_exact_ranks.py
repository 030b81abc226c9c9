"""Exact runs that go on, on other numbers of ranks or after a change of their arithmetic."""

import json

import pytest
import torch
from exact_runs import ExactRuns

from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(3)]


@pytest.fixture
def exact(world, base, dataset_path):
    return ExactRuns.of_sequences(world, base, dataset_path, run__steps=5)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("islands", [{}, {"islands__by": 2}], ids=["flat", "islands"])
def test_a_run_that_goes_on_twice_on_other_numbers_of_ranks(world, exact, islands):
    wanted, wanted_lines = exact.alone()
    first, second = (exact.base / name / "checkpoints" for name in ("first", "second"))
    _, begin = exact.train("first", world, **islands, run__checkpoint_every=2, run__trace_steps=1)
    resumed = {"run__checkpoint_every": 2, "run__resume": first / "step_00000002"}
    _, middle = exact.train("second", world.split("self"), **resumed)
    last = dict.fromkeys(islands, 1)
    digest, end = exact.train("third", world, **last, run__resume=second / "step_00000004")
    assert [lines[0]["step"] for lines in (begin, middle, end)] == [1, 3, 5]
    assert [*begin[:2], *middle[:2], *end] == wanted_lines
    assert digest == wanted
    if islands:
        check_records_of_islands(exact.base / "first", 2)


@pytest.mark.sizes(2)
def test_changes_since_a_checkpoint_are_reported_or_refused(world, exact, monkeypatch, capsys):
    settings = {"run__checkpoint_every": 5, "optim__lr_scheduler_type": "constant"}
    exact.train("run", world, **settings)
    assert json.loads((exact.base / "run" / "summary.json").read_text())["arithmetic"]["run.threads"] == "1"
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", f"rank {world.rank}")
    with pytest.raises(
        AllRanksUserError, match=r"^NPY_DISABLE_CPU_FEATURES: expected the same on every rank with run.exact"
    ):
        exact.train("run", world, **settings, run__steps=6)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "some")
    capsys.readouterr()
    _, lines = exact.train("run", world, **settings, run__steps=6)
    assert lines[-1]["step"] == 6
    output = "WARNING: run.exact: NPY_DISABLE_CPU_FEATURES not set -> some since the checkpoint"
    assert (output in capsys.readouterr().err) == (world.rank == 0)
    try:
        with pytest.raises(
            AllRanksUserError, match=r"^run.threads: expected 1 with run.exact, as in the checkpoint .* got 2"
        ):
            exact.train("run", world, **settings, run__steps=7, run__threads=2)
    finally:
        torch.set_num_threads(1)


def check_records_of_islands(run, num_islands):
    """A line has the waits of the step before it."""
    summary, trace = (json.loads((run / name).read_text()) for name in ("summary.json", "trace.json"))
    waits_s = [json.loads(line)["island_wait_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["num_islands"] == trace["num_islands"] == num_islands
    assert waits_s[0] == 0 and min(waits_s[1:]) > 0
    assert sum(waits_s) < summary["island_wait_s"] <= summary["boundary_wait_s"]
