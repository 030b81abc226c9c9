"""The order of callbacks, and a tracker whose library is missing."""

import re

import pytest
from small_training import configure

from odc_mpi.errors import AllRanksUserError
from odc_mpi.observe import trackers
from odc_mpi.training import run, train

pytestmark = pytest.mark.mpi


@pytest.mark.sizes(1)
def test_callbacks_run_in_the_documented_order(world, dataset_path, shared_dir, monkeypatch):
    table = run.__doc__.partition("in this order:\n\n")[2]
    documented = [name for line in table.splitlines() for name in re.findall(r"[A-Z]\w+", line.strip().split("  ")[0])]
    optional = ("IslandMetrics", "DiLoCo", "PrefixCache")  # only with islands, or a frozen prefix
    documented = [name for name in documented if name not in optional]
    found = []

    def record_callbacks(trainer, *rest):
        for each in trainer.callbacks:
            found.append(next(kind.__name__ for kind in type(each).mro() if kind.__name__ in documented))
        run_steps(trainer, *rest)

    run_steps = run._run_steps
    monkeypatch.setattr(run, "_run_steps", record_callbacks)
    changes = {"run.exact": "true", "data.cost": "fitted", "data.eval_path": dataset_path, "run.steps": 1}
    train.train(configure(dataset_path, **changes, **{"run.dir": shared_dir / "ordered"}), world)
    assert found == documented


@pytest.mark.sizes(2)
def test_a_missing_library_is_reported_before_anything_is_written(world, shared_dir, dataset_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("not_there",))
    with pytest.raises(AllRanksUserError, match="pip install accelerate not_there"):
        train.train(configure(dataset_path, **{"run.dir": shared_dir / "untracked", "run.report_to": "wandb"}), world)
    assert not (shared_dir / "untracked").exists()
