import logging
import types
import warnings

import pytest

from odc_mpi.errors import UserError
from odc_mpi.observe.rank_log import RankLog


def world(rank, size=12):
    return types.SimpleNamespace(
        rank=rank, size=size, hosts=["a"] * 6 + ["b"] * 6, node=rank // 6, num_nodes=2, local_rank=rank % 6,
        local_size=6, mpi_library="MPI 1",
    )  # fmt: skip


def log_messages():
    for _ in range(3):
        with warnings.catch_warnings():  # which makes Python forget that it has shown the warning
            warnings.simplefilter("always")
            warnings.warn("of the tokenizer", FutureWarning, stacklevel=1)
    logging.getLogger("some.library").warning("of the library")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("transformers.models").warning("of the model")
    logging.getLogger("some.library").error("cannot\nwork")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rank", [0, 7])
def test_warnings_go_to_the_file_once_and_only_errors_to_the_terminal(tmp_path, capsys, rank):
    before = logging.getLogger().handlers
    with RankLog(rank) as log:
        warnings.warn("of an import", stacklevel=1)
        log.open(str(tmp_path / "logs"), world(rank))
        log_messages()
    assert logging.getLogger().handlers is before
    printed = capsys.readouterr().err
    output = (tmp_path / "logs" / f"rank-{rank:02}.log").read_text()
    assert output.startswith(f"== rank: {rank} of 12\nhost: {'ab'[rank // 6]}, node {rank // 6} of 2\n")
    for what in ("UserWarning: of an import", "FutureWarning: of the tokenizer", "of the library", "of the model"):
        assert output.count(what) == 1
    assert "chatter" not in output
    assert printed == ("some: cannot work\n" if rank == 0 else "")


@pytest.mark.filterwarnings("default")
def test_without_a_directory_warnings_are_dropped(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        with RankLog(rank) as log:
            log.open(None, world(rank))
            log_messages()
        assert capsys.readouterr().err == ("some: cannot work\n" if rank == 0 else "")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be():
    with RankLog(0) as log, pytest.raises(UserError, match=r"run\.log_dir.*/proc/nowhere"):
        log.open("/proc/nowhere", world(0))
