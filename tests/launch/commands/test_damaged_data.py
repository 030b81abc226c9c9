"""Runs on data sets that are damaged: they end on all ranks, with the last good step saved."""

import shutil

import h5py
import pytest
from damage import flip
from mpi_launch import odc_mpi
from small_run import losses, write_config

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader

#: The step that needs the damaged sequence.
STEP = 5
SAVING = ("--run.checkpoint_every", 3, "--optim.lr_scheduler_type", "constant")


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """The losses of a run on undamaged data."""
    directory = tmp_path_factory.mktemp("undamaged")
    done = odc_mpi(0, "train", "--config", write_config(data, directory), *SAVING)
    assert done.code == 0, done.err
    return losses(directory / "run")


def longest_sequence(path, step):
    with Dataset(path) as dataset:
        loader = Loader(dataset, minibatch_sequences=6, max_tokens_per_microbatch=64)
        indices = [next(loader) for _ in range(step)][-1].indices
        return int(max(indices, key=lambda i: dataset.lengths[i]))


def change_token(path, sequence):
    """Change a token of a sequence, as no checksum of HDF5 would notice; once more, and it is as it was."""
    with h5py.File(path, "a") as file:
        file["tokens"][file["offsets"][sequence] + 1] ^= 1


def refused(done, words):
    assert done.code == 2, (done.out, done.err)
    (line,) = [line for line in done.err.splitlines() if "error" in line]
    assert words in line and "Traceback" not in done.err
    return line


@pytest.mark.parametrize(
    "settings",
    [(), ("--data.balance", "dynamic", "--data.context_parallel", "auto")],
    ids=["static", "tickets and chunks"],
)
def test_damage_in_the_middle_of_a_run(data, expected, tmp_path, settings):
    path = shutil.copy(data, tmp_path / "data.h5")
    train = ("train", "--config", write_config(path, tmp_path), *SAVING, *settings)
    sequence, run = longest_sequence(path, STEP), tmp_path / "run"
    change_token(path, sequence)
    line = refused(odc_mpi(2, *train), f"sequence {sequence} does not match its checksum")
    assert str(path) in line and "rank " in line
    assert list(steps_in(run / "checkpoints")) == [3, STEP - 1]
    assert losses(run) == pytest.approx(expected[: STEP - 1], rel=1e-4)
    change_token(path, sequence)
    done = odc_mpi(2, *train)
    assert done.code == 0 and f"from step {STEP - 1}" in done.out, (done.out, done.err)
    assert losses(run) == pytest.approx(expected, rel=1e-4)


def test_damage_without_checkpoints(data, tmp_path):
    """A chunk that HDF5 refuses. There is nothing to save."""
    path = tmp_path / "data.h5"
    shutil.copy(data, path)
    with h5py.File(path) as file:
        position = file["tokens"].id.get_chunk_info(0).byte_offset
    flip(path, position)
    refused(odc_mpi(2, "train", "--config", write_config(path, tmp_path)), "cannot be read")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_damaged_held_out_data(data, expected, tmp_path):
    path = shutil.copy(data, tmp_path / "eval.h5")
    settings = ("--data.eval_path", path, "--run.eval_every", 4)
    train = ("train", "--config", write_config(data, tmp_path), *SAVING, *settings)
    change_token(path, 7)
    assert str(path) in refused(odc_mpi(2, *train), "sequence 7 does not match its checksum")
    assert list(steps_in(tmp_path / "run" / "checkpoints")) == [3, 4]
    change_token(path, 7)
    done = odc_mpi(2, *train)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
