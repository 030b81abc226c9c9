import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from odc_mpi.data import dataset as module
from odc_mpi.data.dataset import Dataset, DatasetWriter, read_tokenizer_files
from odc_mpi.errors import UserError

Write = Callable[[Sequence[int]], Path]


@pytest.mark.parametrize("buffered", [1, 50, 1 << 20])
def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    monkeypatch.setattr(module, "_BUFFERED_TOKENS", buffered)
    rng = np.random.default_rng(0)
    sequences = []
    with DatasetWriter(tmp_path / "a.h5", vocab_size=2**32, tokenizer="t", source="s") as writer:
        for length in rng.integers(2, 40, 30):
            tokens = rng.integers(0, 2**32, length, dtype=np.uint32)
            mask = rng.random(length) < 0.3
            mask[1] = True
            sequences.append((tokens, mask))
            writer.append(tokens, mask)
    with Dataset(tmp_path / "a.h5") as dataset:
        assert len(dataset) == 30
        assert dataset.lengths.tolist() == [len(tokens) for tokens, _ in sequences]
        assert dataset.num_trained_tokens.tolist() == [int(mask[1:].sum()) for _, mask in sequences]
        assert dataset.max_token_id == max(int(tokens.max()) for tokens, _ in sequences)
        assert dataset.vocab_size == 2**32
        assert (dataset.lengths.dtype, dataset.num_trained_tokens.dtype) == (np.int64, np.int64)
        for i in (7, 0, 29, 7):
            tokens, mask = dataset[i]
            assert (tokens.dtype, mask.dtype) == (np.int64, np.bool_)
            np.testing.assert_array_equal(tokens, sequences[i][0])
            np.testing.assert_array_equal(mask, sequences[i][1])
    assert writer.num_sequences == 30
    assert writer.num_tokens == sum(len(tokens) for tokens, _ in sequences)
    assert writer.num_trained_tokens == sum(int(mask[1:].sum()) for _, mask in sequences)
    assert writer.longest == max(len(tokens) for tokens, _ in sequences)


def test_layout_is_plain_hdf5(write_dataset: Write) -> None:
    with h5py.File(write_dataset([4, 6])) as file:
        assert {name: (file[name].dtype, file[name].shape) for name in file} == {
            "tokens": (np.uint32, (10,)),
            "loss_mask": (np.uint8, (10,)),
            "offsets": (np.int64, (3,)),
            "num_trained_tokens": (np.int32, (2,)),
        }
        assert file["offsets"][:].tolist() == [0, 4, 10]
        attributes = dict(file.attrs)
        assert len(attributes.pop("content")) == 64
        assert attributes == {
            "format": "odc_mpi.dataset",
            "version": 1,
            "vocab_size": 10,
            "max_token_id": 9,
            "tokenizer": "none",
            "source": "test",
            "vocabulary": "",
        }


def test_files_of_the_tokenizer(tmp_path: Path, write_dataset: Write) -> None:
    files = {"tokenizer.json": b"{}", "merges.txt": bytes(range(256)) * 300, "vocab.json": b""}
    with DatasetWriter(tmp_path / "a.h5", vocab_size=9, tokenizer="t", source="s", tokenizer_files=files) as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
    assert read_tokenizer_files(tmp_path / "a.h5") == files
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["tokenizer/merges.txt"].dtype == np.uint8
        assert file["tokenizer/merges.txt"][:].tobytes() == files["merges.txt"]
    with Dataset(tmp_path / "a.h5") as dataset:
        assert len(dataset) == 1
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tokenizer/tokenizer.json"] = np.zeros(3, dtype=np.uint8)
    for path in (write_dataset([4]), tmp_path / "foreign.h5", tmp_path / "none", Path(__file__)):
        assert read_tokenizer_files(path) == {}


def _digest(path: Path, tokens: Sequence[int], mask: Sequence[int]) -> str:
    with DatasetWriter(path, vocab_size=10, tokenizer="none", source="test") as writer:
        for part in (slice(0, 3), slice(3, None)):
            writer.append(np.array(tokens[part], dtype=np.uint32), np.array(mask[part], dtype=bool))
    with Dataset(path) as dataset:
        return dataset.digest()


def test_the_digest_depends_on_tokens_and_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mask = [1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 0, 1, 1, 0]
    known = _digest(tmp_path / "a.h5", tokens, mask)
    assert _digest(tmp_path / "b.h5", [1, 2, 3, 4, 5, 6, 8], mask) != known
    assert _digest(tmp_path / "c.h5", tokens, [0, 1, 0, 0, 1, 0, 1]) != known, "as many are trained"
    monkeypatch.setattr(module, "_BUFFERED_TOKENS", 1)
    assert _digest(tmp_path / "d.h5", tokens, mask) == known, "written in other pieces"


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_out_of_range(write_dataset: Write, index: int) -> None:
    with Dataset(write_dataset([4, 6])) as dataset, pytest.raises(IndexError, match=f"0 to 1, got {index}"):
        dataset[index]


def test_iterates_as_a_sequence(write_dataset: Write) -> None:
    with Dataset(write_dataset([4, 6, 2])) as dataset:
        assert [len(tokens) for tokens, _ in dataset] == [4, 6, 2]


def test_closes_twice_and_opens_many_times(write_dataset: Write) -> None:
    path = write_dataset([4, 6])
    path.chmod(0o444)
    first, second = Dataset(path), Dataset(str(path))
    first.close()
    first.close()
    assert second[1][0].tolist() == [4, 5, 6, 7, 8, 9]
    second.close()


def test_opens_beside_a_lock(write_dataset: Write) -> None:
    """Another library may hold HDF5's own lock; on some file systems taking one fails."""
    path = write_dataset([4, 6])
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with Dataset(path) as dataset:
            assert len(dataset) == 2


def test_an_unfinished_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(KeyError), DatasetWriter(path, vocab_size=9, tokenizer="t", source="s") as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
        raise KeyError("in the middle")
    with pytest.raises(UserError, match=r"data\.path"):
        Dataset(path)


def test_writer_never_overwrites(write_dataset: Write) -> None:
    with pytest.raises(OSError, match="exist"):
        DatasetWriter(write_dataset([4]), vocab_size=9, tokenizer="t", source="s")


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        Dataset(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "data.path" in message
    assert str(path) in message
    return message


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    assert "no file" in refused(tmp_path / "none.h5")
    assert "no file" in refused(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert "expected an HDF5 file" in refused(tmp_path / "a.txt")
    (tmp_path / "empty").touch()
    assert "expected an HDF5 file" in refused(tmp_path / "empty")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["tokens"] = np.arange(3)
    assert "expected a file of odc-mpi prepare" in refused(tmp_path / "b.h5")


def test_newer_version(write_dataset: Write) -> None:
    path = write_dataset([4, 6])
    with h5py.File(path, "a") as file:
        file.attrs["version"] = 2
    assert "newer" in refused(path)


def test_truncated_file(write_dataset: Write) -> None:
    path = write_dataset([400, 600])
    for size in (path.stat().st_size - 1, 3000, 100):
        path.write_bytes(path.read_bytes()[:size])
        refused(path)


def replace(name: str, values: Any) -> Callable[[h5py.File], None]:
    def damage(file: h5py.File) -> None:
        del file[name]
        if values is not None:
            file[name] = values

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        replace("tokens", None),
        replace("tokens", np.arange(10, dtype=np.int64)),
        replace("tokens", np.arange(9, dtype=np.uint32)),
        replace("loss_mask", np.ones(9, dtype=np.uint8)),
        replace("offsets", np.array([0, 10], dtype=np.int64)),
        replace("offsets", np.array([1, 4, 10], dtype=np.int64)),
        replace("offsets", np.array([0, 4, 9], dtype=np.int64)),
        replace("offsets", np.array([0, 11, 10], dtype=np.int64)),
        replace("offsets", np.array([], dtype=np.int64)),
        replace("num_trained_tokens", np.array([0, 1], dtype=np.int32)),
        replace("num_trained_tokens", np.array([4, 1], dtype=np.int32)),
        replace("num_trained_tokens", np.array([1], dtype=np.int32)),
        lambda file: file.attrs.__delitem__("vocab_size"),
    ],
)
def test_inconsistent_files(write_dataset: Write, damage: Callable[[h5py.File], None]) -> None:
    path = write_dataset([4, 6])
    with h5py.File(path, "a") as file:
        damage(file)
    assert "is damaged" in refused(path)


def test_a_data_set_without_sequences(write_dataset: Write) -> None:
    assert "is empty" in refused(write_dataset([]))
