"""`odc-mpi bench` as a person runs it: what it prints, how it ends. No figure is compared with another here."""

import json
import signal
import time
from pathlib import Path

import pytest
from mpi_launch import finish, odc_mpi, start
from processes import descendants, is_python

#: Few operations of each kind, and units of which the last of three ranks owns nothing, 25 elements.
SMALL = ("bench", "transport", "--sizes", "2M,100", "--repeats", 2)
KEYS = ["benchmark", "library", "ranks", "nodes", "cores_per_rank", "repeats", "dtype", "load_average", "sizes"]
VARIANTS = [
    *("memcpy", "fetch_zero_copy", "fetch_copy", "mpi_allgather"),
    *("push_accumulate", "push_mailbox", "mpi_reduce_scatter"),
]


def check_size(size):
    assert list(size) == ["size_bytes", "num_units", "crossing_bytes", "all_at_once"]
    assert 0 <= size["crossing_bytes"] < size["size_bytes"] and size["num_units"] > 1
    assert set(size["all_at_once"]) == set(VARIANTS)
    for name, entry in size["all_at_once"].items():
        assert list(entry) == ["seconds", "gb_per_s", "of_memcpy"]
        assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"]
        moves = name != "fetch_zero_copy"
        assert [entry[key] is not None for key in ("gb_per_s", "of_memcpy")] == [moves, moves]
    assert size["all_at_once"]["memcpy"]["of_memcpy"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_json_is_one_object_with_a_fixed_schema(ranks):
    done = odc_mpi(0, *SMALL, "--json", "--ranks", ranks)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert list(result) == KEYS
    assert (result["benchmark"], result["ranks"], result["nodes"], result["repeats"]) == ("transport", ranks, 1, 2)
    assert [size["size_bytes"] for size in result["sizes"]] == [2 << 20, 100]
    for size in result["sizes"]:
        check_size(size)


@pytest.mark.quick
def test_under_mpiexec_it_takes_the_ranks_it_finds():
    done = odc_mpi(3, *SMALL)
    assert done.code == 0, done.err
    assert "3 ranks on 1 node" in done.out and "measuring units of 2M" in done.err


def test_an_interrupt_ends_all():
    process = start(0, "-m", "odc_mpi", "bench", "transport", "--ranks", 2, "--sizes", "1M", "--repeats", 100000)
    for line in process.stderr:
        if "measuring" in line:
            break
    pids = [pid for pid, words in descendants(process.pid).items() if is_python(words)]
    assert len(pids) == 2
    process.send_signal(signal.SIGTERM)
    assert finish(process, 40).code == 130
    # Open MPI's launcher may end a moment before the last of what it killed.
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)
