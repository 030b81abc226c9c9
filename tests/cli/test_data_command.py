"""`odc-mpi data verify` in this process."""

import h5py
import numpy as np

from odc_mpi.cli import main as cli
from odc_mpi.data.dataset.writer import DatasetWriter


def write(path, **files):
    with DatasetWriter(path, vocab_size=9, tokenizer="t", source="s", tokenizer_files=files) as writer:
        for _ in range(4):
            writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
    return path


def test_every_file_is_verified(tmp_path, capsys):
    good, bad, other = write(tmp_path / "a.h5"), write(tmp_path / "b.h5"), tmp_path / "none.h5"
    no_tokenizer = write(tmp_path / "c.h5", **{"tokenizer.json": b"{"})
    with h5py.File(bad, "a") as file:
        file["tokens"][7] = 0
        file["loss_mask"][19] = 0
    assert cli.main(["data", "verify", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 4 sequences, 20 tokens, no tokenizer: no damage\n"
    assert cli.main(["data", "verify", *map(str, (bad, other, no_tokenizer, good))]) == 2
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.out.splitlines()] == [str(good)]
    errors = printed.err.splitlines()
    assert len(errors) == 3 and all(line.startswith("odc-mpi: error: ") for line in errors)
    assert str(bad) in errors[0] and "2 of 4 sequences, the first: 1, 3" in errors[0]
    assert str(other) in errors[1] and str(no_tokenizer) in errors[2]
