"""States in memory while a model trains: copies for other nodes, and what a run that goes on from them is like."""

import json
import shutil

import numpy as np
import pytest
from exact_runs import ExactRuns
from pretended_nodes import on_pretended_nodes

from odc_mpi.checkpoint.commands import digest_line
from odc_mpi.checkpoint.manifest import read_manifest, step_name
from odc_mpi.checkpoint.rescue import rescue
from odc_mpi.comm import buddies
from odc_mpi.comm.buddies import Buddies
from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.rundir.memory_tier import MemoryTier

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.fixture
def memory(world, base):
    if world.rank == 0:
        (base / "memory").mkdir(parents=True)
    world.gather_objects(None)
    return base / "memory"


@pytest.fixture
def exact(world, base, dataset_path):
    return ExactRuns.of_sequences(world, base, dataset_path, run__steps=5)


def rescue_without(world, run_dir, memory, ranks):
    """On rank 0, rescue a run after its checkpoints and what some ranks had in memory were lost."""
    world.gather_objects(None)
    if world.rank == 0:
        shutil.rmtree(run_dir / "checkpoints")
        for rank in ranks:
            shutil.rmtree(next(memory.glob(f"*/rank_{rank:05d}")))
    return world.gather_objects(rescue(run_dir, memory) if world.rank == 0 else None)[0]


@pytest.mark.parametrize("lost", ["no node", "first node", "last node"])
def test_a_rescued_run_on_another_number_of_ranks(world, exact, memory, monkeypatch, lost):
    """Pieces of a node that is lost are on the next one; the run goes on as if nothing had happened."""
    wanted = exact.alone()
    close = MemoryTier.close
    monkeypatch.setattr(MemoryTier, "close", lambda self, **options: close(self, remove_copies=False))
    nodes = world if lost == "no node" else on_pretended_nodes(world)
    settings = {"run__memory_every": 1, "run__memory_dir": memory}
    exact.train("run", nodes, **settings)
    monkeypatch.undo()
    run_dir = exact.base / "run"
    assert json.loads((run_dir / "summary.json").read_text())["collectives_per_minibatch"] == 3
    first = range(1 if world.size == 2 else 2)
    ranks = {"no node": [], "first node": first, "last node": [world.size - 1]}[lost]
    assert rescue_without(world, run_dir, memory, ranks).step == 4
    assert exact.train("run", world.split("self"), **settings) == wanted
    assert list(memory.iterdir()) == []


def test_a_state_in_memory_is_the_checkpoint_of_its_step(world, exact, memory, monkeypatch):
    """With all of the manifest, that is position in the data, scalars of the optimizer and settings."""
    close = MemoryTier.close
    monkeypatch.setattr(MemoryTier, "close", lambda self, **options: close(self, remove_copies=False))
    settings = {"run__memory_every": 2, "run__memory_dir": memory, "run__checkpoint_every": 4}
    exact.train("run", on_pretended_nodes(world), **settings)
    path = exact.base / "run" / "checkpoints" / step_name(4)
    on_disk, digest = world.gather_objects((read_manifest(path), digest_line(path).split()[0]))[0]
    assert rescue_without(world, exact.base / "run", memory, []).step == 4
    rescued = read_manifest(path)
    assert digest_line(path).split()[0] == digest
    for manifest in (rescued, on_disk):
        for record in manifest.files.values():
            assert record.num_bytes > 0
        manifest.files.pop("index.h5")  # which has times
    assert rescued == on_disk


def test_room_is_checked_before_the_first_step(world, exact, memory):
    with pytest.raises(AllRanksUserError, match=r"^run.memory_dir: expected a directory, got .*/nowhere: No such file"):
        exact.train("run", world, run__memory_every=1, run__memory_dir=memory / "nowhere")
    assert not (exact.base / "run").exists()


def test_files_of_several_parts_and_files_that_are_missing(world, base, memory, monkeypatch):
    """Some are empty, a source has none, and one cannot be written: all others arrive."""
    monkeypatch.setattr(buddies, "PART_BYTES", 1000)
    copies = Buddies(on_pretended_nodes(world))
    sources = world.gather_objects(copies.sources)
    assert sources == {2: [[1], [0]], 3: [[2], [], [0, 1]]}[world.size]
    sizes = [0, 2500, 4000]
    content = [np.random.default_rng(rank).integers(256, size=sizes[rank], dtype=np.uint8) for rank in range(3)]
    own = memory / f"own{world.rank}"
    own.write_bytes(content[world.rank].tobytes())
    arrived = {
        source: [memory / f"copy{world.rank}-{source}-{number}" for number in range(3)] for source in copies.sources
    }
    copies.exchange([own, None if world.rank == 1 else own, own], arrived)
    for source, paths in arrived.items():
        for path, exists in zip(paths, (True, source != 1, True), strict=True):
            assert path.exists() is exists
            assert not exists or path.read_bytes() == content[source].tobytes()
    world.gather_objects(None)
    bad = {source: [memory / "missing" / "x", paths[1]] for source, paths in arrived.items()}
    if 0 in copies.sources:
        with pytest.raises(OSError, match="No such file"):
            copies.exchange([own, own], bad)
        assert arrived[0][1].read_bytes() == content[0].tobytes(), "what follows a failure is not written"
    else:
        copies.exchange([own, own], arrived)
    world.gather_objects(None)
