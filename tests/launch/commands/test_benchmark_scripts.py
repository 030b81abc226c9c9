"""Scripts of `benchmarks/` run and print their object. No figure is compared with another here."""

import json

import pytest
from mpi_launch import ROOT, launch

pytestmark = pytest.mark.slow


def printed(script, *words):
    done = launch(2, ROOT / "benchmarks" / script, *words, timeout_s=100)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def test_checkpoint(tmp_path):
    result = printed("checkpoint.py", "--size", "1M", "--repeats", 1, "--dir", tmp_path)
    assert len(result["variants"]) == 7 and len(result["goals"]) == 5
    assert not list(tmp_path.iterdir())


def test_load_speed(tmp_path):
    """Each of two ranks reads its half of a model, and at most a part of a row more for each slice."""
    result = printed("load_speed.py", "--gigabytes", 0.01, "--dir", tmp_path)
    half = result["file_bytes"] / 2
    assert len(result["ranks"]) == 2
    assert all(half <= rank["requested_bytes"] <= 1.05 * half for rank in result["ranks"])
    assert not list(tmp_path.iterdir())


def test_progress():
    result = printed("progress.py", "--sizes", "64,100K", "--push-sizes", "100K,400", "--repeats", 1)
    assert all(
        (entry["computed_s"] > 0) == (kind != "idle") for size in result["get"] for kind, entry in size["kinds"].items()
    )
    assert [list(size["variants"]) for size in result["reduction"]] == [["put", "accumulate", "mailbox"]] * 2
    assert len(result["goals"]) == 10
