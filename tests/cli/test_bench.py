"""A benchmark that starts mpiexec asks the ranks for the same, word for word."""

import pytest

from odc_mpi.cli import mpiexec
from odc_mpi.cli.main import main, parse


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["transport", "--sizes", "64K,1M", "--repeats", "3", "--json"], 2),
        (["transport", "--ranks", "3", "--timeout-s", "50"], 3),
        (["schedule", "--lengths", "equal", "--step-s", "0.5", "--per-rank", "2"], 8),
        (["schedule", "--ranks", "4"], 4),
        (["train", "--config", "a folder/x.yaml", "--steps", "2"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_ranks_get_the_same_words(monkeypatch, words, ranks):
    started = []
    monkeypatch.setattr(mpiexec, "run", lambda *arguments, **named: started.append((arguments, named)) or 7)
    assert main(["bench", *words]) == 7
    timeout_s = parse(["bench", *words]).timeout_s
    assert started == [((ranks, ["bench", *words]), {"timeout_s": timeout_s})]


def test_ranks_that_take_too_long(monkeypatch, capsys):
    def late(*_, **__):
        raise TimeoutError("2 ranks did not end within 1 s: raise --timeout-s")

    monkeypatch.setattr(mpiexec, "run", late)
    assert main(["bench", "transport"]) == 1
    assert capsys.readouterr().err == "odc-mpi: error: 2 ranks did not end within 1 s: raise --timeout-s\n"
