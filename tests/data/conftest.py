"""Fixtures of several modules: the standard library as a data set, and small data sets."""

import numpy as np
import pytest
from record_files import write_lines

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.prepare import PrepareOptions, prepare
from odc_mpi.data.readers import stdlib
from odc_mpi.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def stdlib_samples():
    """The functions of the standard library, searched once."""
    return list(stdlib.functions())


@pytest.fixture(scope="session")
def stdlib_report(stdlib_samples, tmp_path_factory):
    """The standard library, prepared once, with a tokenizer trained on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib, "functions", lambda: iter(stdlib_samples))
        return prepare(["stdlib"], tmp_path_factory.mktemp("stdlib") / "stdlib.h5", PrepareOptions(vocab_size=2048))


@pytest.fixture(scope="session")
def tokenizer(stdlib_report):
    return load_tokenizer(stdlib_report.tokenizer)


@pytest.fixture
def prepared(stdlib_report, tmp_path):
    """Function that prepares records with the tokenizer of the standard library, and returns the report."""

    def write(*records, name="a", **options):
        source = write_lines(tmp_path / f"{name}.jsonl", *records)
        return prepare([source], tmp_path / f"{name}.h5", PrepareOptions(**{"tokenizer": stdlib_report.path} | options))

    return write


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The current directory is an empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write_dataset(tmp_path):
    """Write sequences of given lengths; every token of the file is different, about half of them are trained."""

    def write(lengths):
        path = tmp_path / "data.h5"
        rng = np.random.default_rng(0)
        begin = 0
        with DatasetWriter(path, vocab_size=sum(lengths), tokenizer="none", source="test") as writer:
            for length in lengths:
                loss_mask = rng.random(length) < 0.5
                loss_mask[-1] = True
                writer.append(np.arange(begin, begin + length, dtype=np.uint32), loss_mask)
                begin += length
        return path

    return write
