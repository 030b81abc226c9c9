"""Runs on data sets that are damaged: they end on all ranks, with the last good step saved.

The error as one line of a command: test_train_command.py.
"""

import shutil

import h5py
import pytest
from damage import flip
from small_training import configure, first_minibatches

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.slow]

#: The step that needs the damaged sequence.
STEP = 5
SAVING = {"run__checkpoint_every": 3}


@pytest.fixture
def expected(run):
    """The losses of a run on undamaged data."""
    return run("undamaged")


@pytest.fixture
def copy(world, dataset_path, base):
    """A copy of the data, and a function that changes it, on rank 0 alone; once more, and it is as it was."""
    path = base.with_suffix(".h5")

    def change(how):
        world.gather_objects(None)
        if world.rank == 0:
            how(path)
        world.gather_objects(None)

    change(lambda path: shutil.copy(dataset_path, path))
    return path, change


def change_token(sequence):
    """Return a function that changes a token of a sequence, as no checksum of HDF5 would notice."""

    def change(path):
        with h5py.File(path, "a") as file:
            file["tokens"][file["offsets"][sequence] + 1] ^= 1

    return change


@pytest.mark.parametrize(
    "settings",
    [{}, {"data__balance": "dynamic", "data__context_parallel": "auto"}],
    ids=["static", "tickets and chunks"],
)
def test_damage_in_the_middle_of_a_run(world, run, copy, base, expected, settings, capfd):
    path, change = copy
    with Dataset(path) as dataset:
        indices = first_minibatches(configure(path, run__steps=STEP), dataset)[STEP - 1]
        sequence = int(max(indices, key=lambda i: dataset.lengths[i]))
    settings = SAVING | settings | {"data__path": path}
    change(change_token(sequence))
    with pytest.raises(AllRanksUserError, match=f"sequence {sequence} does not match its checksum") as caught:
        run("run", **settings)
    assert str(path) in str(caught.value) and "rank " in str(caught.value) and "\n" not in str(caught.value)
    assert list(steps_in(base / "run" / "checkpoints")) == [3, STEP - 1]
    change(change_token(sequence))
    capfd.readouterr()
    assert run("run", **settings) == pytest.approx(expected, rel=1e-4)
    if world.rank == 0:
        assert f"from step {STEP - 1}" in capfd.readouterr().out


def test_damage_without_checkpoints(run, copy, base):
    """A chunk that HDF5 refuses. There is nothing to save."""
    path, change = copy
    with h5py.File(path) as file:
        position = file["tokens"].id.get_chunk_info(0).byte_offset
    change(lambda path: flip(path, position))
    with pytest.raises(AllRanksUserError, match="cannot be read"):
        run("run", data__path=path)
    assert not (base / "run" / "checkpoints").exists()


def test_damaged_held_out_data(run, copy, base, expected):
    path, change = copy
    change(change_token(7))
    settings = SAVING | {"data__eval_path": path, "run__eval_every": 4}
    with pytest.raises(AllRanksUserError, match="sequence 7 does not match its checksum") as caught:
        run("run", **settings)
    assert str(path) in str(caught.value)
    assert list(steps_in(base / "run" / "checkpoints")) == [3, 4]
    change(change_token(7))
    assert run("run", **settings) == pytest.approx(expected, rel=1e-4)
