import fcntl
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from pair_files import write_pairs
from user_errors import refused

from odc_mpi.data.dataset import writer as module
from odc_mpi.data.dataset.format import COLUMNS, DamagedDatasetError, content_digest
from odc_mpi.data.dataset.reader import Dataset, find_counts, read_tokenizer_files, verify_dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import UserError


@pytest.mark.parametrize("buffered", [1, 50, 1 << 20])
def test_round_trip(tmp_path, monkeypatch, buffered):
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
    assert (writer.num_sequences, writer.num_tokens) == (30, sum(len(tokens) for tokens, _ in sequences))
    assert writer.num_trained_tokens == sum(int(mask[1:].sum()) for _, mask in sequences)


@pytest.mark.parametrize("names", [*([name] for name in COLUMNS["pairs"]), COLUMNS["pairs"]])
def test_pairs_round_trip_and_changed_or_removed_ones_are_damage(tmp_path, names):
    write_pairs(tmp_path / "pairs.h5", [(3, 2, 5), (1, 4, 1)])
    with Dataset(tmp_path / "pairs.h5") as dataset:
        assert dataset.lengths.tolist() == [10, 6]
        assert dataset.kind == "pairs"
        assert np.stack(list(dataset.columns.values()), 1).tolist() == [[3, 2, 2], [1, 4, 4]]
        assert dataset[1][1].tolist() == [False, *[True] * 5]
    with h5py.File(tmp_path / "pairs.h5", "r+") as file:
        for name in names:
            if len(names) == 1:
                file[name][0] = 1
            else:
                del file[name]
    not_opened("columns were changed", tmp_path / "pairs.h5")


def test_layout_is_plain_hdf5(write_dataset):
    with h5py.File(write_dataset([4, 6])) as file:
        assert {name: (file[name].dtype, file[name].shape) for name in file} == {
            "tokens": (np.uint32, (10,)),
            "loss_mask": (np.uint8, (10,)),
            "offsets": (np.int64, (3,)),
            "num_trained_tokens": (np.int32, (2,)),
            "checksums": (np.uint32, (2,)),
        }
        assert file["offsets"][:].tolist() == [0, 4, 10]
        attributes = dict(file.attrs)
        assert len(attributes.pop("content")) == 64
        texts = {"format": b"odc_mpi.dataset", "tokenizer": b"none", "source": b"test", "vocabulary": b""}
        assert attributes == texts | {"version": 2, "vocab_size": 10, "max_token_id": 9}


def test_files_of_the_tokenizer(tmp_path, write_dataset):
    files = {"tokenizer.json": b"{}", "merges.txt": bytes(range(256)) * 300, "vocab.json": b""}
    with DatasetWriter(tmp_path / "a.h5", vocab_size=9, tokenizer="t", source="s", tokenizer_files=files) as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
    assert read_tokenizer_files(tmp_path / "a.h5") == files
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["tokenizer/merges.txt"].dtype == np.uint8
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tokenizer/tokenizer.json"] = np.zeros(3, dtype=np.uint8)
    for path in (write_dataset([4]), tmp_path / "foreign.h5", tmp_path / "none", Path(__file__)):
        assert read_tokenizer_files(path) == {}


def test_the_digest_depends_on_tokens_and_masks(tmp_path, monkeypatch):
    def digest(tokens, mask):
        path = tmp_path / "a.h5"
        path.unlink(missing_ok=True)
        with DatasetWriter(path, vocab_size=10, tokenizer="none", source="test") as writer:
            for part in (slice(0, 3), slice(3, None)):
                writer.append(np.array(tokens[part], dtype=np.uint32), np.array(mask[part], dtype=bool))
        with Dataset(path) as dataset:
            return dataset.digest()

    tokens, mask = [1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 0, 1, 1, 0]
    known = digest(tokens, mask)
    assert digest([1, 2, 3, 4, 5, 6, 8], mask) != known
    assert digest(tokens, [0, 1, 0, 0, 1, 0, 1]) != known, "as many are trained"
    monkeypatch.setattr(module, "_BUFFERED_TOKENS", 1)
    assert digest(tokens, mask) == known, "written in other pieces"


def test_closes_twice_and_opens_many_times(write_dataset):
    """Also beside HDF5's own lock, which another library may hold, and which some file systems do not have."""
    path = write_dataset([4, 6])
    path.chmod(0o444)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        first, second = Dataset(path), Dataset(str(path))
    first.close()
    first.close()
    with pytest.raises(ValueError, match="is closed") as caught:
        first[0]
    assert not isinstance(caught.value, UserError), "an intact file is not called damaged"
    assert second[1][0].tolist() == [4, 5, 6, 7, 8, 9]
    for index in (-1, 2, 100):
        refused(f"0 to 1, got {index}", second.__getitem__, index, error=IndexError)
    second.close()


def test_an_unfinished_file_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with pytest.raises(KeyError), DatasetWriter(path, vocab_size=9, tokenizer="t", source="s") as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
        raise KeyError("in the middle")
    refused("data.path", Dataset, path)


def test_writer_never_overwrites(write_dataset):
    refused("exist", DatasetWriter, write_dataset([4]), vocab_size=9, tokenizer="t", source="s", error=OSError)


def not_opened(words, path):
    line = refused(words, Dataset, path)
    assert str(path) in line and ("data.path" in line or "prepare it again" in line)


def test_missing_foreign_and_truncated_files(tmp_path, write_dataset):
    path, text, foreign = write_dataset([400, 600]), tmp_path / "a.txt", tmp_path / "b.h5"
    for content in ("text", ""):
        text.write_text(content)
        not_opened("expected an HDF5 file", text)
    with h5py.File(foreign, "w") as file:
        file["tokens"] = np.arange(3)
    with h5py.File(path, "a") as file:
        file.attrs.update(version=1, format="odc_mpi.dataset")
    for words, other in (
        ("no file", tmp_path / "none.h5"),
        ("no file", tmp_path),
        ("a file of odc-mpi prepare", foreign),
    ):
        not_opened(words, other)
    not_opened("expected version 2 of...prepare it again", path)
    for size in (path.stat().st_size - 1, 3000, 100):
        path.write_bytes(path.read_bytes()[:size])
        not_opened("", path)


def replace(name, values, dtype=None, **options):
    def damage(file):
        old = file[name]
        del file[name]
        if values is not None:
            data = np.array(values, dtype or old.dtype)
            options.setdefault("chunks", old.chunks)
            file.create_dataset(name, data=data, **{"fletcher32": True, "maxshape": (None,)} | options)

    return damage


def link(kind):
    def damage(file):
        file.move("tokens", "others")
        file["tokens"] = kind

    return damage


def virtual(file):
    del file["loss_mask"]
    layout = h5py.VirtualLayout((10,), np.uint8)
    layout[:] = h5py.VirtualSource("missing.h5", "loss_mask", (10,))
    file.create_virtual_dataset("loss_mask", layout)


def grow(file):
    """As many tokens as no disk has, none of them written."""
    for name in ("tokens", "loss_mask"):
        file[name].resize((2**42,))


@pytest.mark.parametrize(
    "damage",
    [
        replace("tokens", None),
        replace("tokens", np.arange(10), np.int64),
        replace("tokens", np.arange(9)),
        replace("tokens", np.arange(10), fletcher32=False),
        replace("tokens", np.arange(10), chunks=None, maxshape=(10,), fletcher32=False),
        replace("tokens", np.arange(10).reshape(10, 1), chunks=(16, 1), maxshape=(None, 1)),
        replace("loss_mask", np.ones(9)),
        *(replace("offsets", values) for values in ([0, 5, 10], [])),
        replace("num_trained_tokens", [1]),
        replace("checksums", [1, 2]),
        *map(link, (h5py.SoftLink("/others"), h5py.SoftLink("/tokens"), h5py.ExternalLink("other.h5", "/tokens"))),
        virtual,
        grow,
        *(lambda file, v=value: file.attrs.update(content=v) for value in (np.bytes_(b"0" * 64), [1, 2])),
        *(lambda file, v=value: file.attrs.update(vocab_size=v) for value in ("many", float("nan"))),
        *(lambda file, n=name: file.attrs.update({n: [2, 2]}) for name in ("version", "max_token_id", "vocabulary")),
        lambda file: file.attrs.__delitem__("vocab_size"),
    ],
)
def test_inconsistent_files(write_dataset, damage):
    path = write_dataset([4, 6])
    with h5py.File(path, "a", libver="latest") as file:
        damage(file)
    not_opened("is damaged", path)


INDEX = ("offsets", "num_trained_tokens", "checksums")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("offsets", values) for values in ([0, 10], [1, 4, 10], [0, 4, 9], [0, 11, 10], [])),
        *(("num_trained_tokens", values) for values in ([0, 1], [4, 1], [1])),
        ("checksums", [1]),
    ],
)
def test_inconsistent_files_with_the_right_digest(write_dataset, name, values):
    path = write_dataset([4, 6])
    with h5py.File(path, "a", libver="latest") as file:
        replace(name, values)(file)
        file.attrs["content"] = np.bytes_(content_digest(*(file[name][:] for name in INDEX)).encode())
    not_opened("is damaged", path)


@pytest.mark.parametrize(("name", "value"), [("tokens", 0), ("loss_mask", 0), ("loss_mask", 1), ("max_token_id", 5)])
def test_sequences_that_are_not_those_that_were_written(write_dataset, name, value):
    """With correct checksums of HDF5, as a program would write them."""
    path = write_dataset([4, 6])
    with h5py.File(path, "a", libver="latest") as file:
        if name in file:
            file[name][4:10] = value
        else:
            file.attrs[name] = value
    with Dataset(path) as dataset:
        assert len(dataset[0][0]) == 4
        words = f"{path}...sequence 1 does not match"
        refused(words, dataset.__getitem__, 1, error=DamagedDatasetError)
    refused("1 of 2 sequences, the first: 1", verify_dataset, path, error=DamagedDatasetError)


def everything(path):
    with Dataset(path) as dataset, h5py.File(path, locking=False) as file:
        sequences = [(tokens.tolist(), mask.tolist()) for tokens, mask in dataset]
        attributes = {name: repr(value) for name, value in file.attrs.items()}
        pairs = [values.tolist() for values in dataset.columns.values()]
        return pairs, sequences, dataset.digest(), read_tokenizer_files(path), attributes, find_counts([path], "r")


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_refused_or_has_no_effect(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(module, "CHUNK", 64)
    path, damaged, rng = tmp_path / "a.h5", tmp_path / "b.h5", np.random.default_rng(seed)
    files = {"tokenizer.json": b"{}" * 100, "merges.txt": b"a b"}
    with DatasetWriter(path, vocab_size=90, tokenizer="t", source="s", tokenizer_files=files) as writer:
        for length in rng.integers(3, 90, 12):
            pair = dict(zip(COLUMNS["pairs"], (1, length - 2, length - 2), strict=True)) if seed % 2 else None
            writer.append(rng.integers(0, 90, length, dtype=np.uint32), np.ones(length, dtype=bool), pair)
        # As an attribute of more than 4 KiB, it would have no checksum.
        writer.set_attributes(request="r", report=json.dumps({"lines": ["x" * 100] * 60}), sources="s", more=1, last=2)
    assert f"12 {'pairs' if seed % 2 else 'sequences'}" in verify_dataset(path)
    content, expected, num_refused = path.read_bytes(), everything(path), 0
    positions = list(rng.choice(len(content), 200, replace=False))
    with h5py.File(path) as file:
        for name in COLUMNS["pairs"] if seed % 2 else ():
            positions += list(file[name].id.get_chunk_info(0).byte_offset + rng.choice(12 * 4, 5, replace=False))
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.integers(8)
        damaged.write_bytes(flipped)
        try:
            verify_dataset(damaged)
        except UserError:
            num_refused += 1
        else:
            assert everything(damaged) == expected, f"position {position}"
    assert num_refused > 80


def test_a_data_set_without_sequences(write_dataset):
    not_opened("is empty", write_dataset([]))
