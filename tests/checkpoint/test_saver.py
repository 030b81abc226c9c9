"""Saving in the background: when a checkpoint is complete, and the outcome of an incomplete one."""

import errno
import gc
import os
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from damage import flip

from odc_mpi.checkpoint import manifest as manifests
from odc_mpi.checkpoint import publish
from odc_mpi.checkpoint import saver as savers
from odc_mpi.checkpoint.commands import index_line, list_lines, open_newest_checkpoint, verify
from odc_mpi.checkpoint.groups import checkpoint_directories
from odc_mpi.checkpoint.manifest import (
    FileRecord,
    Manifest,
    TensorRecord,
    read_manifest,
    shard_name,
    step_name,
    steps_in,
    write_manifest,
)
from odc_mpi.checkpoint.publish import prune
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.shard_file import ShardEntry
from odc_mpi.errors import UserError
from odc_mpi.models.load import load_model


def manifest(step, size):
    ranges = tuple((rank, 3 * rank, 3 * rank + 3) for rank in range(size))
    record = TensorRecord("trainable", "float32", (3 * size,), ranges)
    return Manifest(step, size, {"model/x": record}, {}, "AdamW", {})


def entries(rank, size, value):
    return [ShardEntry("model/x", np.full(3, value, dtype=np.float32), 3 * rank, (3 * size,), "float32")]


class Ranks:
    """Savers of some ranks, and the boundary at which their reports are gathered."""

    def __init__(self, directory, size, keep=0):
        self.directory, self.size, self.warnings = directory, size, []
        self.savers = [Saver(directory, r, size, "t", keep=keep, warn=self.warnings.append) for r in range(size)]

    def start(self, step):
        for rank, saver in enumerate(self.savers):
            head = manifest(step, self.size) if rank == 0 else None
            saver.start(step, entries(rank, self.size, float(step)), head)

    def wait(self):
        for saver in self.savers:
            saver.wait_until_written()

    def boundary(self):
        reports = np.array([saver.report() for saver in self.savers])
        for saver in self.savers:
            saver.receive_reports(reports)
        self.savers[0].wait_until_published()

    def save(self, *steps):
        for step in steps:
            self.start(step)
            self.wait()
            self.boundary()

    def steps(self):
        return list(steps_in(self.directory))


def test_complete_only_when_all_have_reported(tmp_path, monkeypatch):
    ranks, go, write = Ranks(tmp_path, 2), threading.Event(), savers.write_shard

    def slow(path, *rest):
        if path.name == shard_name(5, 1):
            assert go.wait(10)
        return write(path, *rest)

    monkeypatch.setattr(savers, "write_shard", slow)
    ranks.start(5)
    ranks.savers[0].wait_until_written()
    assert ranks.savers[1].busy and not ranks.savers[0].busy
    ranks.boundary()
    assert ranks.steps() == []
    go.set()
    ranks.wait()
    assert ranks.steps() == []
    ranks.boundary()
    assert ranks.steps() == [5]
    with Checkpoint(tmp_path / step_name(5)) as checkpoint:
        assert checkpoint.read("model/x", 0, 6).tolist() == [5.0] * 6
    assert not list(tmp_path.glob(".*"))
    assert ranks.warnings == []


@pytest.mark.parametrize(
    ("module", "name", "loses", "reason"),
    [
        (savers, "write_shard", False, "rank 1 could not write"),
        (savers, "write_shard", True, "rank 0 does not see the file .* on a file system that all nodes share"),
        (publish, "write_index", False, "No space left on device"),
        (publish, "write_manifest", False, "No space left on device"),
    ],
    ids=["rank 1", "lost file", "index", "manifest"],
)
def test_nothing_is_left_of_a_checkpoint_that_fails(tmp_path, monkeypatch, module, name, loses, reason):
    ranks, write = Ranks(tmp_path, 3), getattr(module, name)
    ranks.save(1)

    def fail(path, *rest):
        if not loses and (module is publish or path.name == shard_name(2, 1)):
            raise OSError(28, "No space left on device")
        record = write(path, *rest)
        if path.name == shard_name(2, 1):
            path.unlink()
        return record

    monkeypatch.setattr(module, name, fail)
    ranks.save(2)
    if reason.startswith("rank 1"):
        assert (
            ranks.warnings[0] == "rank 1 could not write its part of the checkpoint of step 2: No space left on device"
        )
    assert re.search(f"WARNING: checkpoint of step 2 not saved: {reason}", ranks.warnings[-1])
    assert ranks.steps() == [1] and not list(tmp_path.glob(".*"))
    assert (ranks.savers[0].num_saved, ranks.savers[0].num_failed, ranks.savers[0].last_failed) == (1, 1, True)
    monkeypatch.undo()
    ranks.save(3)
    assert ranks.steps() == [1, 3] and not ranks.savers[0].last_failed


def test_the_index_of_many_ranks_is_written_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "MAX_INDEXED_RANKS", 2)
    ranks = Ranks(tmp_path, 3)
    ranks.save(1)
    index = tmp_path / step_name(1) / "index.h5"
    assert not index.exists() and verify(tmp_path)[1] == 0
    assert index_line(tmp_path) == f"wrote {index}"
    with h5py.File(index) as file:
        assert file["model/x"][:].tolist() == [1.0] * 9
    assert index_line(tmp_path) == f"wrote {index}", "it may be repeated"
    assert verify(tmp_path)[1] == 0
    (tmp_path / step_name(1) / shard_name(1, 2)).unlink()
    with pytest.raises(UserError, match=r"rank_00002\.h5 is missing"):
        index_line(tmp_path)
    two = Ranks(tmp_path / "two", 2)
    two.save(1)
    (two.directory / step_name(1) / "index.h5").unlink()
    assert verify(two.directory)[1] == 1
    time.sleep(1.1)  # HDF5 can write times in seconds
    index_line(two.directory)
    assert verify(two.directory)[1] == 0, "written again with the same checksum"


def test_old_ones_go(tmp_path):
    ranks = Ranks(tmp_path, 1, keep=3)
    ranks.save(1, 2, 3, 4)
    assert ranks.steps() == [2, 3, 4]
    (tmp_path / step_name(5)).mkdir()  # incomplete ones do not count, and stay
    prune(tmp_path, 1, protected_step=2)
    assert ranks.steps() == [2, 4, 5]
    assert not list(tmp_path.glob(".*"))


def test_a_manifest_that_is_missing_damaged_or_newer(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, 1)
    ranks.save(1)
    directory = tmp_path / step_name(1)
    path = directory / "manifest.json"
    intact = path.read_text()
    for text in (intact[:-20], intact.replace('"step": 1', '"step": 2'), "[]", "", "\0" * 100, "[" * 10**5):
        path.write_text(text)
        with pytest.raises(UserError, match=r"damaged|not the manifest"):
            read_manifest(directory)
    path.unlink()
    with pytest.raises(UserError, match="not a complete checkpoint"):
        read_manifest(directory)
    path.write_text(intact)
    monkeypatch.setattr(manifests, "VERSION", 7)
    (verdict, reason), number = verify(tmp_path)
    assert number == 1
    assert verdict.endswith("NOT VERIFIED") and "expected version 7 of the format, got 3" in reason


RECORD = TensorRecord("trainable", "float32", (6,), ((0, 0, 3), (1, 3, 6)))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"size": 3},
        {"size": 10**12},
        {"metadata": []},
        {"optimizer": 1},
        {"scalars": []},
        {"scalars": {"step": {"x": "1"}}},
        {"files": {}},
        {"tensors": {}},
        *(
            {"tensors": {"model/x": replace(RECORD, **fields)}}
            for fields in (
                {"kind": "x"},
                {"dtype": "float3"},
                {"shape": (-6,)},
                {"shape": (7,)},
                {"ranges": ((0, 0, 3), (2, 3, 6))},
                {"ranges": ((0, 0, 3), (1, 4, 6))},
                {"ranges": ((0, 0, 3), (1, 3, 3), (1, 3, 6))},
                {"ranges": ()},
            )
        ),
    ],
    ids=str,
)
def test_an_inconsistent_manifest_with_a_valid_checksum(tmp_path, changes):
    Ranks(tmp_path, 2).save(1)
    directory = tmp_path / step_name(1)
    intact = read_manifest(directory)
    assert intact.tensors == {"model/x": RECORD}
    write_manifest(directory / "manifest.json", replace(intact, **changes))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: ") as caught:
        read_manifest(directory)
    assert "\n" not in str(caught.value)
    assert verify(tmp_path)[1] == 1


def test_tensors_are_of_the_dtype_that_the_manifest_says(tmp_path):
    Ranks(tmp_path, 2).save(1)
    directory = tmp_path / step_name(1)
    record = replace(RECORD, dtype="float64")
    write_manifest(directory / "manifest.json", replace(read_manifest(directory), tensors={"model/x": record}))
    for stop in (3, 6):
        with Checkpoint(directory) as checkpoint, pytest.raises(UserError, match=r"float64 in model/x, got float32$"):
            checkpoint.read("model/x", 0, stop)


def test_a_checkpoint_of_another_module_is_no_transformers_model(tmp_path):
    Ranks(tmp_path, 1).save(1)
    with pytest.raises(UserError, match=r"got .*step_00000001 of another module: read its tensors from index\.h5"):
        load_model(tmp_path)


def test_keys_that_are_numbers(tmp_path):
    """JSON makes them text, of which "10" comes before "2"."""
    metadata = {"id2label": {2: "a", 10: "b", 9: "c"}}
    files = dict.fromkeys((shard_name(1, 0), "index.h5"), FileRecord(1, 2))
    write_manifest(tmp_path / "manifest.json", replace(manifest(1, 1), metadata=metadata, files=files))
    assert read_manifest(tmp_path).metadata == {"id2label": {"2": "a", "10": "b", "9": "c"}}


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """As of a bad sector, or a file server that forgot it: the rest is still looked at, and it is named."""
    Ranks(tmp_path, 3).save(1)
    preadv = os.preadv

    def fail(descriptor, buffers, offset):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(("rank_00001.h5", "index.h5")):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    with Checkpoint(tmp_path / step_name(1)) as checkpoint:
        checkpoint.read("model/x", 3, 4)
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(UserError, match=r"cannot read .*rank_00001\.h5, model/x: Input/output error"):
            checkpoint.read("model/x", 0, 6)
        assert "rank_00001.h5: Input/output error" in checkpoint.check_files([0, 1])
    (verdict, *lines), number = verify(tmp_path)
    assert number == 1 and verdict.endswith("DAMAGED")
    assert len(lines) == 2 and all("cannot read" in line and "Input/output error" in line for line in lines)
    assert "rank_00001.h5" in lines[0] and "index.h5" in lines[1]
    monkeypatch.undo()
    assert verify(tmp_path)[1] == 0


def test_what_was_saved_is_let_go(tmp_path):
    """Neither the manifest nor the thread of an earlier checkpoint is kept by those of later ones."""
    ranks = Ranks(tmp_path, 1)
    heads = []
    for step in (1, 2, 3):
        head = manifest(step, 1)
        heads.append(weakref.ref(head))
        ranks.savers[0].start(step, entries(0, 1, 1.0), head)
        del head
        ranks.wait()
        ranks.boundary()
    gc.collect()
    assert [head() for head in heads] == [None, None, None]


def test_every_flipped_bit_of_a_checkpoint_is_found(tmp_path):
    Ranks(tmp_path, 2).save(1)
    assert verify(tmp_path) == ([f"{tmp_path / step_name(1)}  intact"], 0)
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / step_name(1)).iterdir()):
        for position in rng.integers(path.stat().st_size, size=20).tolist():
            flip(path, position)
            lines, damaged = verify(tmp_path)
            assert damaged == 1 and path.name in lines[1], (path, position, lines)
            flip(path, position)
    assert verify(tmp_path)[1] == 0


def test_which_checkpoints_a_path_means(tmp_path):
    ranks = Ranks(tmp_path / "run" / "checkpoints", 1)
    ranks.save(1, 2)
    both = [ranks.directory / step_name(step) for step in (1, 2)]
    assert checkpoint_directories(tmp_path / "run") == checkpoint_directories(ranks.directory) == both
    assert checkpoint_directories(both[0]) == [both[0]]
    assert open_newest_checkpoint(tmp_path / "run").manifest.step == 2
    (both[1] / "manifest.json").unlink()
    assert open_newest_checkpoint(tmp_path / "run").manifest.step == 1
    assert ["INVALID" in line for line in list_lines(tmp_path / "run")] == [False, True]
    with pytest.raises(UserError, match="not a complete checkpoint"):
        open_newest_checkpoint(both[1])
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint_directories(tmp_path)


def test_who_may_not_write_any_more(tmp_path, monkeypatch):
    """As when another run has taken over the directory: neither published nor pruned."""
    ranks = Ranks(tmp_path, 2, keep=1)
    ranks.save(1)
    ranks.start(2)
    ranks.wait()

    def raise_taken_over():
        raise OSError("another run has taken over")

    monkeypatch.setattr(ranks.savers[0], "_check", raise_taken_over)
    ranks.boundary()
    assert ranks.steps() == [1]
    ranks.save(3)
    assert ranks.steps() == [1]
    assert [line.removesuffix("; training continues") for line in ranks.warnings] == [
        "WARNING: checkpoint of step 2 not saved: another run has taken over",
        "rank 0 could not write its part of the checkpoint of step 3: another run has taken over",
        "WARNING: checkpoint of step 3 not saved: rank 0 could not write",
    ]
    assert not list(tmp_path.glob(".step*"))
