"""Files of hidden states of several ranks."""

import errno

import h5py
import numpy as np
import pytest

from odc_mpi import hdf5_file
from odc_mpi.data.dataset.hidden_states import HiddenStates

A, B, C = (bytes([i] * 16) for i in range(3))


def values(seed, length=4):
    return np.random.default_rng(seed).integers(-9, 9, (length, 3)).astype(np.int16)


@pytest.fixture
def stores(tmp_path):
    made = []

    def make(rank, identity="a model"):
        made.append(HiddenStates(tmp_path / "states", identity, f"start-{rank}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_ranks_read_what_others_have_completed(stores):
    first, second = stores(0), stores(1)
    first.append(A, values(0))
    second.append(B, values(1, 2))
    second.refresh()
    assert second.read([A]) is None
    first.finish()
    second.finish()
    first.append(C, values(2))
    for store in (first, second, stores(2)):
        store.refresh()
        assert store.num_tokens == 6
        np.testing.assert_array_equal(store.read([B, A]), np.concatenate([values(1, 2), values(0)]))
        assert store.read([A, C]) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_several_values_the_choice_does_not_depend_on_who_stored_them(stores, order):
    one, *others = map(stores, (2, 0, 1))
    for store, seed in zip(others, order, strict=True):
        for _ in range(2):
            store.append(A, values(seed))
        store.finish()
    store.refresh()
    chosen = store.read([A])
    one.append(A, values(0))
    one.append(A, values(1))
    one.finish()
    assert {len(file["hidden"]) for file in map(h5py.File, one._directory.glob("start-2-*.h5"))} == {8}
    again = stores(3)
    np.testing.assert_array_equal(again.read([A]), chosen)


def test_files_that_cannot_be_used_are_listed(stores, tmp_path):
    for store in [stores(rank, "another" if rank == 2 else "a model") for rank in range(3)]:
        store.append(A, values(0))
        store.finish()
        store.close()
    paths = sorted((tmp_path / "states").glob("*.h5"))
    paths[0].write_bytes(b"")
    (tmp_path / "states" / "killed.partial").touch()
    found = stores(3)
    assert {path.name for path in found.stale} == {"killed.partial", paths[0].name, paths[2].name}
    np.testing.assert_array_equal(found.read([A]), values(0))
    found.close()
    with h5py.File(paths[1], "r+") as file:
        file["hidden"][1, 1] += 1
    damaged = stores(4)
    assert damaged.num_tokens == 4 and damaged.read([A]) is None and damaged.num_tokens == 0


def test_a_full_disk_is_reported_once_and_nothing_is_left(stores, tmp_path, monkeypatch, capfd):
    def write(stream, content):
        stream.error = OSError(errno.ENOSPC, "No space left on device")
        stream.seek(stream.tell() + len(content))
        return len(content)

    monkeypatch.setattr(hdf5_file._Stream, "write", write)
    store = stores(0)
    for key in (A, B, C):
        store.append(key, values(0))
        store.finish()
    assert capfd.readouterr().err.count("no more hidden states are stored: ") == 1
    assert not list((tmp_path / "states").iterdir()) and store.num_tokens == 0
