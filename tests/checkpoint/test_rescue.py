"""States in memory: what is written there, and the checkpoint that is made from it after a death."""

import os
import queue
import shutil
import stat
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from damage import flip

from odc_mpi.checkpoint import memory as memories
from odc_mpi.checkpoint import rescue as rescues
from odc_mpi.checkpoint.commands import digest_line, open_newest_checkpoint, verify
from odc_mpi.checkpoint.manifest import Manifest, TensorRecord, add_state, read_manifest, step_name, steps_in
from odc_mpi.checkpoint.memory import MemorySaver, make_rank_directory, remove, require_room
from odc_mpi.checkpoint.rescue import rescue
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.shard_file import ShardEntry
from odc_mpi.errors import UserError

NUMEL = 240_000  # more than one block of checksums
SECTIONS = ("model", "optimizer/exp_avg")
RECORDS = {"optimizer/exp_avg": {"x": "float32"}, "optimizer/step": {"x": 5.0}}


class Mail:
    """Copies files of each rank to the next host, which has as many ranks, in the threads of this process."""

    def __init__(self, rank, size, hosts, boxes):
        per_host = size // hosts
        self._target, self._boxes = (rank + per_host) % size, boxes
        self._rank, self.sources = rank, [(rank - per_host) % size]

    def exchange(self, files, copies):
        self._boxes[self._target].put([path and path.read_bytes() for path in files])
        for path, content in zip(copies[self.sources[0]], self._boxes[self._rank].get(timeout=20), strict=True):
            if content is not None:
                path.write_bytes(content)


class Job:
    """The ranks of a run on some hosts, which have directories in memory of their own."""

    def __init__(self, root, size=2, hosts=1, token="a"):
        self.run_dir, self.size, self.warnings = root / "run", size, []
        self.memory = [root / f"memory{host}" for host in range(hosts)]
        boxes = [queue.Queue() for _ in range(size)]
        self.directories, self.savers = [], []
        for path in (self.run_dir, *self.memory):
            path.mkdir(exist_ok=True)
        for rank in range(size):
            mail = Mail(rank, size, hosts, boxes) if hosts > 1 else None
            directory = make_rank_directory(self.memory[rank * hosts // size], self.run_dir, "7", rank)
            self.directories.append(directory)
            self.savers.append(MemorySaver(directory, rank, size, token, mail, self.warnings.append))

    def entries(self, rank, step):
        share, bounds = NUMEL // self.size, (NUMEL,)
        values = (np.arange(share) + 1000 * rank + step).astype("<f4")
        return [ShardEntry(f"{section}/x", values, share * rank, bounds, "float32") for section in SECTIONS]

    def manifest(self, step):
        share = NUMEL // self.size
        record = TensorRecord(
            "trainable", "float32", (NUMEL,), tuple((r, r * share, r * share + share) for r in range(self.size))
        )
        return Manifest(step, self.size, {"model/x": record}, {}, "AdamW", {"loader": {"position": step}})

    def start(self, step, ranks=None):
        for rank in range(self.size) if ranks is None else ranks:
            head = asdict(self.manifest(step)) if rank == 0 else None
            self.savers[rank].start(step, self.entries(rank, step), RECORDS, head)
        for saver in self.savers:
            saver.wait_until_written()

    def save(self, *steps):
        for step in steps:
            self.start(step)
            reports = np.array([saver.report() for saver in self.savers])
            for saver in self.savers:
                saver.receive_reports(reports)
                assert not saver.pending
        return self

    def save_on_disk(self, step):
        savers = [Saver(self.run_dir / "checkpoints", r, self.size, "t", warn=pytest.fail) for r in range(self.size)]
        for rank, saver in enumerate(savers):
            head = add_state(self.manifest(step), [RECORDS] * self.size) if rank == 0 else None
            saver.start(step, self.entries(rank, step), head)
            saver.wait_until_written()
        savers[0].receive_reports(np.array([saver.report() for saver in savers]))
        savers[0].wait_until_published()

    def pieces(self, host=0, suffix=".json"):
        return sorted(self.memory[host].rglob(f"rank_*{suffix}"))

    def newest(self, host=0, suffix=".h5"):
        """The piece of each rank of the newest state of a host, of copies, too."""
        return [path.with_suffix(suffix) for path in self.pieces(host) if self.step_of(path) == self.last(host)]

    def step_of(self, path):
        return rescues._read_piece(path).step

    def last(self, host):
        return max(map(self.step_of, self.pieces(host)))

    def rescue(self, host=0):
        return rescue(self.run_dir, self.memory[host])

    def check(self, step):
        """The newest checkpoint is that of a step, like one of the saver, and memory is free."""
        assert max(steps_in(self.run_dir / "checkpoints")) == step
        assert verify(self.run_dir)[1] == 0
        assert [path.name for path in (self.run_dir / "checkpoints").iterdir() if path.name.startswith(".")] == []
        path = self.run_dir / "checkpoints" / step_name(step)
        rescued, digest = read_manifest(path), digest_line(self.run_dir)
        assert {each.name for each in path.iterdir()} == {*rescued.files, "manifest.json"}
        shutil.rmtree(self.run_dir / "checkpoints")
        self.save_on_disk(step)
        assert rescued == read_manifest(self.run_dir / "checkpoints" / step_name(step))
        assert digest == digest_line(self.run_dir)


@pytest.mark.parametrize("size", [1, 3])
def test_a_state_in_memory_becomes_an_ordinary_checkpoint(tmp_path, size):
    job = Job(tmp_path, size).save(4, 5, 6)
    assert [stat.S_IMODE(path.parent.stat().st_mode) for path in job.directories] == [0o700] * size
    assert len(job.pieces()) == 2 * size
    step, message = job.rescue()
    assert step == 6 and message == f"rescued step 6 from memory: {job.run_dir}/checkpoints/step_00000006"
    assert list(job.memory[0].iterdir()) == []
    job.check(6)
    with open_newest_checkpoint(job.run_dir) as checkpoint:
        assert checkpoint.manifest.metadata == {"loader": {"position": 6}}


def test_a_death_while_a_state_is_written(tmp_path):
    """The state before is complete; it is not overwritten before all ranks have the next one."""
    job = Job(tmp_path).save(4, 5)
    job.start(6, ranks=[0])
    step, message = job.rescue()
    assert step == 5 and message.endswith("(step 6 in memory lacks the pieces of rank 1)")
    job.check(5)


def test_a_rank_that_fails_to_write_keeps_the_state_before(tmp_path, monkeypatch):
    job, write = Job(tmp_path).save(4, 5), memories.ShardWriter._overwrite

    def fail(self, entries):
        if "rank_00001" in str(self._path):
            raise OSError(28, "No space left on device")
        return write(self, entries)

    monkeypatch.setattr(memories.ShardWriter, "_overwrite", fail)
    job.save(6, 7)
    assert (
        len(job.warnings) == 2 and "No space left on device: free some memory, or set run.memory_dir" in job.warnings[0]
    )
    monkeypatch.undo()
    assert sorted(map(job.step_of, job.pieces())) == [5, 5, 7], "what is overwritten has no description"
    assert job.rescue().step == 5
    job.check(5)


def test_a_flipped_bit_and_a_missing_piece(tmp_path):
    """In the newest state and in the one before: the checkpoint on disk is used, and a line says why."""
    job = Job(tmp_path).save(4, 5)
    job.save_on_disk(3)
    flip(job.newest()[1], 150_000)
    next(path for path in job.pieces() if job.step_of(path) == 4).unlink()
    step, message = job.rescue()
    assert step is None and message.startswith(
        "no step rescued from memory, the newest checkpoint on disk, of step 3, is used: "
    )
    assert "rank_00001.h5 is damaged: the checksum of" in message
    assert "; step 5 in memory lacks the pieces of rank 1; " in message
    assert message.endswith("step 4 in memory lacks the pieces of rank 0")
    assert not list(job.memory[0].iterdir())
    assert open_newest_checkpoint(job.run_dir).manifest.step == 3


def test_every_flipped_bit_of_a_piece_is_found(tmp_path):
    job = Job(tmp_path, size=1).save(5)
    saved = tmp_path / "saved"
    shutil.copytree(job.memory[0], saved)
    draws = np.random.default_rng(0)
    for suffix in (".h5", ".json"):
        for _ in range(15):
            shutil.rmtree(job.memory[0])
            shutil.copytree(saved, job.memory[0])
            path = job.newest(suffix=suffix)[0]
            flip(path, int(draws.integers(path.stat().st_size)))
            assert job.rescue().step is None


@pytest.mark.parametrize("on_disk", [5, 6])
def test_a_checkpoint_on_disk_that_is_as_new(tmp_path, on_disk):
    job = Job(tmp_path).save(4, 5)
    job.save_on_disk(on_disk)
    step, message = job.rescue()
    assert step is None and message.endswith(f"of step {on_disk}, is used: step 5 in memory is not newer")
    job.check(on_disk)


def test_nothing_in_memory(tmp_path):
    job = Job(tmp_path)
    assert job.rescue() == (
        None,
        f"no step rescued from memory, there is no checkpoint on disk: {job.memory[0]} has no states of this run",
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_lost(tmp_path, lost):
    """The other has its own pieces and copies of those that are lost."""
    job = Job(tmp_path, size=4, hosts=2).save(4, 5)
    shutil.rmtree(job.memory[lost])
    assert job.rescue(1 - lost).step == 5
    job.check(5)


def test_the_copy_is_used_if_the_own_piece_is_damaged(tmp_path):
    job = Job(tmp_path, size=2, hosts=2).save(5)
    flip(job.directories[0] / "0" / "rank_00000.h5", 150_000)
    step, message = job.rescue(0)
    assert step is None and "rank_00000.h5 is damaged" in message and message.endswith("lacks the pieces of rank 0")
    assert [path.name.split(".")[1] for path in job.run_dir.glob("checkpoints/.*")] == ["step_00000005"]
    assert job.rescue(1).step == 5
    job.check(5)


def test_hosts_gather_their_pieces_one_after_the_other(tmp_path):
    """Three hosts without the copies of the first, and of the newest state without the last host's."""
    job = Job(tmp_path, size=3, hosts=3).save(4, 5)
    for host in range(3):
        for path in job.pieces(host):
            if path.stem != path.parts[-3] or (host == 2 and job.step_of(path) == 5):
                path.unlink()
    assert [job.rescue(host).step for host in range(3)] == [None, None, 4]
    job.check(4)


@pytest.mark.parametrize("repetition", range(5))
def test_hosts_at_the_same_time(tmp_path, repetition):
    """Whoever completes it publishes it; each of them has all pieces, or only its own."""
    job = Job(tmp_path, size=2, hosts=2).save(4, 5)
    if repetition % 2:
        for host in range(2):
            for path in job.pieces(host):
                if path.stem != path.parts[-3]:
                    path.unlink()
    go, found = threading.Barrier(2), []

    def work(host):
        go.wait(10)
        found.append(job.rescue(host))

    threads = [threading.Thread(target=work, args=[host]) for host in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2 and 5 in [step for step, _ in found], found
    job.check(5)


def test_a_later_start_counts_more_than_a_later_step(tmp_path):
    """As of a host that was away, whose states are of a start that was not rescued."""
    job = Job(tmp_path, size=1, hosts=1, token="a").save(9)
    other = tmp_path / "other"
    job.memory[0].rename(other)
    job = Job(tmp_path, size=1, token="b").save(6)
    shutil.copytree(next(other.iterdir()), Path(f"{next(job.memory[0].iterdir())}0"))
    assert job.rescue().step == 6


def test_disk_errors_keep_the_memory(tmp_path, monkeypatch):
    job = Job(tmp_path).save(5)

    def fail(*arguments):
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(OSError, match="No space left"):
            job.rescue()
    assert job.rescue().step == 5
    job.check(5)


def test_room_and_ownership(tmp_path):
    job = Job(tmp_path).save(5)
    free = shutil.disk_usage(tmp_path).free
    require_room(tmp_path, job.run_dir, free // 2, 1)
    with pytest.raises(
        UserError, match=r"^run.memory_dir: expected .* MiB free in .* each with a copy .* or remove run.memory_every$"
    ):
        require_room(tmp_path, job.run_dir, 2 * free, 2)
    with pytest.raises(UserError, match=r"^run.memory_dir: expected a directory, got .*nowhere: No such file"):
        require_room(tmp_path / "nowhere", job.run_dir, 1, 1)
    left = job.directories[0].parent
    if os.getuid() == 0:
        os.chown(left, 12345, -1)
        remove(job.memory[0], job.run_dir)
        assert left.exists()
        os.chown(left, 0, -1)
    remove(job.memory[0], tmp_path / "another_run")
    assert left.exists()
    remove(job.memory[0], job.run_dir)
    assert not left.exists()
    left.symlink_to(tmp_path)
    with pytest.raises(UserError, match="belongs to another user"):
        make_rank_directory(job.memory[0], job.run_dir, "7", 0)
