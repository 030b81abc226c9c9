"""Directories that not all ranks see: refused before the first step."""

import os
import shutil
import time

import pytest
from small_training import configure, save_model

from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.rundir import run_dir_lock
from odc_mpi.training.train import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]
SHORT = {"run.steps": 1, "run.checkpoint_every": 1}


@pytest.fixture
def own_dir(world, base, monkeypatch):
    """The working directory of this rank, which has another one than the other."""
    path = base / f"rank{world.rank}"
    path.mkdir(parents=True)
    monkeypatch.chdir(path)
    return path


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_a_run_directory_that_one_rank_does_not_see(world, dataset_path, own_dir, resumed):
    if resumed:
        train(configure(dataset_path, **SHORT, **{"run.dir": own_dir.parent / "rank0" / "runs" / "a"}), world)
    world.gather_objects(None)
    before = sorted(own_dir.rglob("*"))
    with pytest.raises(AllRanksUserError, match=r"run\.dir: .* wrote to .*/rank0\S* .*/rank1\S* for rank 1 on "):
        train(configure(dataset_path, **{"run.dir": "runs/a", "run.steps": 2}), world)
    assert sorted(own_dir.rglob("*")) == before


def test_a_file_that_another_host_shows_late(world, base, monkeypatch):
    monkeypatch.setattr(world, "hosts", ["node0", "node1"])
    shown = time.monotonic() + 0.3 * world.rank
    monkeypatch.setattr(os, "access", lambda path, mode: path.exists() and time.monotonic() > shown)
    run_dir_lock.require_shared(base / "runs", world)
    monkeypatch.setattr(run_dir_lock, "SEARCH_S", 0.1)
    monkeypatch.setattr(os, "access", lambda path, mode: world.rank == 0)
    with pytest.raises(AllRanksUserError, match="for rank 1 on node1: set run"):
        run_dir_lock.require_shared(base / "runs", world)
    world.gather_objects(None)
    assert not base.exists()


def test_a_model_that_one_rank_does_not_see(world, dataset_path, own_dir):
    save_model(world, own_dir.parent / "rank0" / "published")
    with pytest.raises(AllRanksUserError, match=r"model\.path: .* 'published', which is missing on rank 1: set model"):
        train(configure(dataset_path, **{"model.path": "published", "run.dir": own_dir.parent / "runs"}), world)


def test_a_checkpoint_of_which_one_rank_lacks_a_file(world, dataset_path, own_dir):
    train(configure(dataset_path, **SHORT, **{"run.dir": own_dir.parent / "a"}), world)
    world.gather_objects(None)
    shutil.copytree(own_dir.parent / "a", "a")
    if world.rank == 1:
        next((own_dir / "a").rglob("*rank*1*.h5")).unlink()
    changes = {"run.dir": own_dir.parent / "b", "run.resume": "a", "run.steps": 2}
    with pytest.raises(AllRanksUserError, match=r"run\.resume: .*\(on rank 1\)"):
        train(configure(dataset_path, **changes), world)
