"""A run with a tracker: one series of all its starts, written by one rank."""

import pytest
from small_training import configure

from odc_mpi.errors import AllRanksUserError
from odc_mpi.observe import trackers
from odc_mpi.training.run import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_is_one_series(world, shared_dir, dataset_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"run.dir": shared_dir / "tracked", "run.report_to": "tensorboard", "run.checkpoint_every": 2}
    train(configure(dataset_path, **settings, **{"run.steps": 3}), world)
    # The last checkpoint, of step 3, is not wanted.
    at_2 = shared_dir / "tracked" / "checkpoints" / "step_00000002"
    summary = train(configure(dataset_path, **settings, **{"run.steps": 5, "run.resume": at_2}), world)
    if world.rank == 0:
        (path,) = (shared_dir / "tracked" / "trackers" / "tensorboard").iterdir()
        events = event_accumulator.EventAccumulator(str(path)).Reload()
        points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        assert all([point.step for point in series] == [1, 2, 3, 4, 5] for series in points.values())
        assert points["train/loss"][-1].value == pytest.approx(summary["loss_last"])
        wanted = {"grad_norm", "learning_rate", "epoch", "idle_fraction", "tokens_per_s", "slowest_rank"}
        assert {f"train/{name}" for name in wanted} <= points.keys()
    world.gather_objects(None)


def test_a_missing_library_is_reported_before_anything_is_written(world, shared_dir, dataset_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("not_there",))
    with pytest.raises(AllRanksUserError, match="pip install accelerate not_there"):
        train(configure(dataset_path, **{"run.dir": shared_dir / "untracked", "run.report_to": "wandb"}), world)
    assert not (shared_dir / "untracked").exists()
