"""A crash before each system call that changes names or flushes them: the next start finds a complete checkpoint."""

import itertools
import os
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
from checkpoint_helpers import save
from torch import nn
from toy_models import VOCABULARY

from odc_mpi.checkpoint.manifest import CHECKPOINTS, read_manifest, shard_name, step_name, steps_in
from odc_mpi.checkpoint.publish import prune, publish, remove_incomplete
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.training.rundir.records import open_run_directory, reopen_run_directory
from odc_mpi.training.rundir.resume import _list_checkpoints

CALLS = ("rename", "replace", "link", "unlink", "rmdir", "mkdir", "fsync")
SIZE = 2


class CrashError(BaseException):
    """As no handler of the package's expects it."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Complete checkpoints of steps 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved") / CHECKPOINTS
    for step in (2, 4, 6):
        save(directory, SIZE, step=step, make_module=lambda: nn.Embedding(VOCABULARY, 1))
    return directory


@pytest.fixture
def run_dir(saved, tmp_path):
    """Makes a run directory with these checkpoints, and what a save of step 4 has written so far."""
    turn = 0

    def make():
        nonlocal turn
        turn += 1
        path = tmp_path / f"run{turn}"
        shutil.copytree(saved, path / CHECKPOINTS)
        unfinished = path / CHECKPOINTS / f".{step_name(4)}.t"
        unfinished.mkdir()
        for rank in range(SIZE):
            shutil.copy(saved / step_name(4) / shard_name(4, rank), unfinished)
        return path

    return make


def completes(function, path, number):
    """Call a function that ends before its n-th system call, and return whether it came to its end."""
    calls = itertools.count()

    def counted(call):
        def wrapper(*args, **options):
            if next(calls) >= number:
                raise CrashError
            return call(*args, **options)

        return wrapper

    with pytest.MonkeyPatch.context() as patch, suppress(CrashError):
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        function(path)
        return True
    return False


def crashes(function, run_dir, prepare=lambda path: None):
    """Yield a run directory for each call before which a function crashed in it, and one for which it did not."""
    for number in range(100):
        path = run_dir()
        prepare(path)
        completed = completes(function, path, number)
        yield path
        if completed:
            assert number > 3
            return
    raise AssertionError("more calls than expected")


def publish_again(run_dir):
    """Publish step 4, of which there is a checkpoint."""
    directory = run_dir / CHECKPOINTS
    old = read_manifest(directory / step_name(4))
    ranks_files = {name: record for name, record in old.files.items() if "rank" in name}
    publish(
        directory / f".{step_name(4)}.t",
        replace(old, files=ranks_files, metadata={"is": "new"}),
        directory / step_name(4),
    )


def found_at_start(run_dir):
    """Return the checkpoints that a start finds, by step, after it has read every byte of each."""
    found = [group[0] for group in _list_checkpoints(run_dir, 10.0)]
    for path in found:
        with Checkpoint(path) as checkpoint:
            assert list(checkpoint.verify()) == [], path
    return {int(path.name.removeprefix("step_")): path for path in found}


def find_and_clean(run_dir):
    """Do what a start does with the checkpoints of a run."""
    found_at_start(run_dir)
    remove_incomplete(run_dir / CHECKPOINTS)


def complete_below(run_dir):
    return sorted(path.parent.name for path in run_dir.rglob("step_*/manifest.json"))


def test_a_step_saved_twice_is_there_at_any_moment(run_dir):
    for path in crashes(publish_again, run_dir):
        assert list(found_at_start(path)) == [2, 4, 6]
        remove_incomplete(path / CHECKPOINTS)
        metadata = read_manifest(path / CHECKPOINTS / step_name(4)).metadata
        assert metadata in ({}, {"is": "new"}), metadata
        assert not list((path / CHECKPOINTS).glob(".*"))
    assert metadata == {"is": "new"}


def test_a_start_that_crashes_after_a_crash(run_dir):
    """The next one finds as much."""
    for first in range(3, 10):
        for path in crashes(find_and_clean, run_dir, lambda path, first=first: completes(publish_again, path, first)):
            assert list(found_at_start(path)) == [2, 4, 6], f"the first crash was before call {first}"
            remove_incomplete(path / CHECKPOINTS)
            assert not list((path / CHECKPOINTS).glob(".*"))
            shutil.rmtree(path)


def test_a_checkpoint_that_cannot_get_its_name_leaves_the_old_one(run_dir, monkeypatch):
    path, rename = run_dir(), os.rename

    def fail(source, goal, **options):
        if os.fspath(source).endswith(".t"):
            raise OSError(5, "Input/output error")
        rename(source, goal, **options)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        publish_again(path)
    assert list(steps_in(path / CHECKPOINTS)) == [2, 4, 6]


def test_pruning_leaves_complete_checkpoints_at_any_moment(run_dir):
    for path in crashes(lambda path: prune(path / CHECKPOINTS, 1), run_dir):
        steps = list(found_at_start(path))
        assert steps[-1] == 6
        remove_incomplete(path / CHECKPOINTS)
    assert steps == [6]


@pytest.mark.parametrize(
    "ready", [lambda path: open_run_directory(path, "new\n"), lambda path: reopen_run_directory(path, "new\n", 2)]
)
def test_preparing_a_run_directory_loses_nothing(run_dir, ready):
    def write(path):
        (path / "config.yaml").write_text("old\n")
        (path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 5}\n')

    for path in crashes(ready, run_dir, write):
        assert complete_below(path) == [step_name(step) for step in (2, 4, 6)]
        assert {file.read_text() for file in path.rglob("config.yaml")} <= {"old\n", "new\n"}
        found_at_start(path)
        ready(path)
    assert (path / "config.yaml").read_text() == "new\n"


def test_a_retired_one_that_was_half_removed_stays_away(run_dir):
    path = run_dir()
    retired = path / CHECKPOINTS / f".retired_{step_name(8)}.17"
    (path / CHECKPOINTS / step_name(6)).rename(retired)
    (retired / "manifest.json").unlink()
    assert list(found_at_start(path)) == [2, 4]
    remove_incomplete(path / CHECKPOINTS)
    assert list(steps_in(path / CHECKPOINTS)) == [2, 4] and not list((path / CHECKPOINTS).glob(".*"))
