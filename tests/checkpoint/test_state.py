"""A state that is saved on some ranks is bitwise identical on any other number of ranks."""

import functools

import h5py
import numpy as np
import pytest
import torch
from checkpoint_helpers import assert_same, build, load, save

from odc_mpi.checkpoint import shard_file
from odc_mpi.checkpoint.commands import digest_line
from odc_mpi.checkpoint.manifest import shard_name
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import require_model
from odc_mpi.errors import UserError

SIZES = (1, 2, 3, 4)
STEP = "step_00000002"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves on some ranks once per type: `saved(size, dtype)` gives directory, state and buffers."""

    @functools.cache
    def get(size, dtype):
        directory = tmp_path_factory.mktemp("saved")
        state, buffers, warnings = save(directory, size, param_dtype=dtype)
        assert not warnings
        return directory / STEP, state, buffers

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("writers", SIZES)
@pytest.mark.parametrize("readers", SIZES)
def test_any_number_of_ranks(saved, writers, readers, dtype):
    directory, state, buffers = saved(writers, dtype)
    loaded, loaded_buffers = load(directory, readers, param_dtype=dtype)
    assert_same(loaded, state)
    assert_same(loaded_buffers, buffers)


def test_the_digest_depends_on_values_and_dtypes(saved, tmp_path):
    directory, *_ = saved(2, torch.float32)
    load(directory, 2, steps=1, out=tmp_path)
    assert len({digest_line(path).split()[0] for path in (directory, tmp_path, saved(2, torch.bfloat16)[0])}) == 3


def test_masters_are_saved_not_what_is_fetched(saved):
    _, state, _ = saved(2, torch.bfloat16)
    master = state["model/embedding.weight"]
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float()), "as bf16 has it"
    assert state["model/norm.weight"].dtype == torch.bfloat16, "frozen: no master"


def test_a_parameter_that_was_never_used_has_no_state(tmp_path):
    state, _, warnings = save(tmp_path, 2, idle=True)
    assert not warnings
    assert [path for path in state if path.endswith("/idle")] == ["model/idle"]
    loaded, _ = load(tmp_path / STEP, 3, idle=True)
    assert_same(loaded, state)
    trained, _ = load(tmp_path / STEP, 3, idle=True, steps=2)
    assert torch.equal(trained["model/idle"], state["model/idle"])


def test_another_precision(saved):
    directory, state, _ = saved(2, torch.bfloat16)
    loaded, _ = load(directory, 2, param_dtype=torch.float32)
    for path, value in state.items():
        assert torch.equal(loaded[path], value.to(loaded[path].dtype)), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("writers", [1, 4])
def test_the_index_shows_full_tensors(saved, writers, dtype):
    directory, state, buffers = saved(writers, dtype)
    shapes = {f"model/{name}": p.shape for name, p in build().named_parameters()}
    with h5py.File(directory / "index.h5") as file:
        names = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            found = file[name][()]
            kind = file[name].attrs["dtype"]
            if name in state:
                shape = shapes["model/" + name.split("/", 2 if name.startswith("optimizer") else 1)[-1]]
                wanted = state[name].reshape(shape)
                assert kind == str(wanted.dtype).removeprefix("torch.")
            else:
                wanted = buffers[name.removeprefix("model/")]
            assert found.shape == tuple(wanted.shape)
            stored = wanted.view(torch.int16).numpy().view(np.uint16) if kind == "bfloat16" else wanted.numpy()
            np.testing.assert_array_equal(found, stored, err_msg=name)
        tensors = {path for path in state if not path.startswith("optimizer/step/")}
        assert set(names) == tensors | {f"model/{name}" for name in buffers}


def test_missing_values_show_as_nan(tmp_path, monkeypatch):
    """Files of the current directory, where HDF5 looks, too, do not stand in for those that an index names."""
    save(tmp_path, 2, step=2)
    save(tmp_path, 2, step=3)
    missing = tmp_path / STEP / shard_name(2, 1)
    missing.unlink()
    monkeypatch.chdir(tmp_path / "step_00000003")
    assert list(tmp_path.glob("step_00000003/*rank_00001.h5"))
    with h5py.File(tmp_path / STEP / "index.h5") as file:
        assert any(np.isnan(item[()]).any() for item in file["model"].values())
    with pytest.raises(UserError, match=r"rank_00001\.h5 is missing"):
        load(tmp_path / STEP, 1)


def test_each_rank_reads_what_it_owns(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 64)
    state, *_ = save(tmp_path, 2)
    num_read, read = [], shard_file.ShardFile._read_blocks

    def count(*arguments):
        content = read(*arguments)
        num_read.append(content.nbytes)
        return content

    monkeypatch.setattr(shard_file.ShardFile, "_read_blocks", count)
    load(tmp_path / STEP, 3)
    stored = sum(value.nbytes for value in state.values())
    # Whole blocks are read: at the ends of pieces some that are another's, too. Buffers are everyone's.
    assert stored < sum(num_read) < 1.5 * stored


def test_sgd_with_and_without_momentum(tmp_path):
    for momentum in (0.0, 0.9):
        make = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        state, *_ = save(tmp_path / str(momentum), 2, make=make)
        loaded, _ = load(tmp_path / str(momentum) / STEP, 3, make=make)
        assert_same(loaded, state)
        assert any(path.startswith("optimizer/momentum_buffer/") for path in state) == bool(momentum)


def make_wider_norm():
    module = build()
    module.norm = torch.nn.LayerNorm(9).requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (functools.partial(build, tied=False), "head.weight is absent there, trainable"),
        (functools.partial(build, frozen=False), "is frozen of shape .* there, trainable of shape"),
        (make_wider_norm, r"norm.bias is frozen of shape \[8\]"),
    ],
)
def test_another_model_is_refused(saved, make, words):
    directory, *_ = saved(2, torch.float32)
    with Checkpoint(directory) as checkpoint, pytest.raises(UserError, match=words):
        require_model(checkpoint, make())
