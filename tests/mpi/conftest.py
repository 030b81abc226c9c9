"""Worlds and small data for tests that run under mpiexec, on any number of ranks."""

from functools import partial

import numpy as np
import pytest
from adversary import late
from grpo_job import write_files, write_teacher
from mpi4py import MPI
from pair_files import write_labeled, write_pairs

from odc_mpi.comm import factory
from odc_mpi.comm.islands import exchange
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce import mailbox
from odc_mpi.comm.windows.rma import Window
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.models import families
from odc_mpi.runtime.world import World

VOCAB = 61
#: Numbers of ranks that a test runs on without the marker `sizes`: a pair, and a pair with a bystander.
USUAL_SIZES = (2, 3)
#: A launch with more ranks runs all tests on them.
MAX_RANKS = 4


def pytest_collection_modifyitems(config, items):
    """Skip tests whose outcome this number of ranks cannot change."""
    size = MPI.COMM_WORLD.size
    if not config.getoption("--with-mpi") or size > MAX_RANKS:
        return
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("sizes")
        sizes = mark.args if mark else USUAL_SIZES
        (kept if "mpi" not in item.keywords or size in sizes else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def _one_trial_per_configuration():
    """Decide once whether a model trains packed: in tests with few steps, each trial takes longer than the training."""
    decided, try_packed = {}, families._try_packed

    def decide(module):
        key = f"{type(module)} {module.config.to_json_string(use_diff=False)}"
        if key not in decided:
            decided[key] = try_packed(module)
        return decided[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_try_packed", decide)
        yield


@pytest.fixture(scope="session")
def world():
    """One world for all tests; a rank that is late by a minute ends the launch."""
    with World(timeout_s=60) as made:
        yield made


@pytest.fixture(scope="session")
def shared_dir(world, tmp_path_factory):
    """A directory that all ranks see, rank 0's."""
    return world.gather_objects(tmp_path_factory.mktemp("shared"))[0]


@pytest.fixture
def base(shared_dir, request):
    """A directory of the test's own that all ranks see; not there yet."""
    name = f"{request.node.path.stem}_{request.node.name}"
    return shared_dir / "".join(c if c.isalnum() else "_" for c in name)


@pytest.fixture(scope="session")
def dataset_path(world, shared_dir):
    """Forty random sequences of 2 to 40 tokens, and thirteen held-out ones; a third of the tokens is not trained."""
    return write_data(world, shared_dir / "random.h5", write_sequences)


def write_data(world, path, write):
    """Have rank 0 write a data set, and one of held-out data beside it."""
    if world.rank == 0:
        write(path, held_out=False)
        write(path.with_suffix(".eval.h5"), held_out=True)
    world.gather_objects(None)
    return path


def write_sequences(path, held_out):
    rng = np.random.default_rng(11 if held_out else 7)
    with DatasetWriter(path, vocab_size=VOCAB, tokenizer="none", source="random") as writer:
        for length in rng.integers(2, 61 if held_out else 41, size=13 if held_out else 40):
            mask = rng.random(length) < 0.7
            mask[-1] = True
            writer.append(rng.integers(0, VOCAB, size=length).astype(np.uint32), mask)


@pytest.fixture(scope="session")
def pairs_path(world, shared_dir):
    """Forty pairs, and ten held-out ones, with prompts and answers of 1 to 15 tokens."""
    counts = np.random.default_rng(3).integers(1, 16, (50, 3)).tolist()
    return write_data(world, shared_dir / "pairs.h5", partial(write_some, write_pairs, counts))


@pytest.fixture(scope="session")
def labels_path(world, shared_dir):
    """Forty answers with labels, and ten held-out ones, with prompts and answers of 1 to 15 tokens."""
    counts = np.random.default_rng(4).integers(1, 16, (50, 2)).tolist()
    return write_data(world, shared_dir / "labels.h5", partial(write_some, write_labeled, counts))


def write_some(write, counts, path, held_out):
    write(path, counts[40:] if held_out else counts[:40], VOCAB, seed=int(held_out))


@pytest.fixture
def allocate(world):
    """Allocate a transport with a unit of one parameter for each size; they are all closed, twice, after the test."""
    made = []

    def allocate(transport, sizes, trainable=True):
        specs = [[ParameterSpec(f"p{i}", (numel,), trainable)] for i, numel in enumerate(sizes)]
        num_islands = transport.group.num_islands
        transport.allocate(
            [FlatLayout.build(f"unit{i}", spec, world.size, num_islands) for i, spec in enumerate(specs)]
        )
        made.append(transport)
        return transport

    yield allocate
    for transport in made:
        transport.close()
        transport.close()


@pytest.fixture
def late_windows(monkeypatch):
    """Have host windows be late; `flush_s` of this object is the time that a flush of this rank takes."""
    late_window = late(Window)
    for module in (factory, mailbox):
        monkeypatch.setattr(module, "Window", late_window)
    monkeypatch.setattr(exchange, "_ExposedWindow", late(exchange._ExposedWindow))
    return late_window


@pytest.fixture(scope="session")
def grpo_dir(world, shared_dir):
    """Prompts of numbers, and rewards."""
    path = shared_dir / "grpo"
    if world.rank == 0:
        write_files(path)
    world.gather_objects(None)
    return path


@pytest.fixture(scope="session")
def teacher_dir(world, shared_dir):
    """A model to distill from."""
    path = shared_dir / "teacher"
    if world.rank == 0:
        write_teacher(path)
    world.gather_objects(None)
    return path
