"""`odc-mpi bench` as a person runs it: what it prints, how it ends. No figure is compared with another here."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from mpi_launch import finish, odc_mpi, start
from processes import descendants, is_python

#: Few operations of each kind; and units of which the last rank owns nothing, 25 elements.
SMALL = ("bench", "transport", "--sizes", "2M", "--repeats", 2)
SMALL_AND_TINY = ("bench", "transport", "--sizes", "2M,100", "--repeats", 2)
KEYS = [
    *("benchmark", "library", "ranks", "nodes", "cores_per_rank", "repeats", "dtype"),
    *("load_average", "left_out", "sizes"),
]
VARIANTS = [
    *("memcpy", "fetch_zero_copy", "fetch_copy", "mpi_allgather", "gloo_all_gather"),
    *("push_accumulate", "push_mailbox", "mpi_reduce_scatter", "gloo_reduce_scatter"),
]


def directories():
    return set(Path(tempfile.gettempdir()).glob("odc_mpi-gloo-*"))


def check_size(size, ranks):
    assert list(size) == ["size_bytes", "num_units", "crossing_bytes", "all_at_once"]
    assert 0 <= size["crossing_bytes"] < size["size_bytes"]
    assert size["num_units"] > 1
    assert set(size["all_at_once"]) == set(VARIANTS)
    for name, entry in size["all_at_once"].items():
        assert list(entry) == ["seconds", "gb_per_s", "of_memcpy", "of_gloo"]
        assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"] < 10
        if name == "fetch_zero_copy":
            assert entry["gb_per_s"] is entry["of_memcpy"] is entry["of_gloo"] is None
            continue
        speed = entry["gb_per_s"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"] < 1000
        assert entry["of_memcpy"] > 0
        assert (entry["of_gloo"] is None) == (name == "memcpy")
    assert size["all_at_once"]["memcpy"]["of_memcpy"] == 1


@pytest.mark.parametrize(
    ("ranks", "command", "sizes"), [(1, SMALL, [2 << 20]), (2, SMALL_AND_TINY, [2 << 20, 100]), (3, SMALL, [2 << 20])]
)
def test_json_is_one_object_with_a_fixed_schema(ranks, command, sizes):
    done = odc_mpi(0, *command, "--json", "--ranks", ranks)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert list(result) == KEYS
    assert (result["benchmark"], result["ranks"], result["nodes"], result["repeats"]) == ("transport", ranks, 1, 2)
    assert result["left_out"] == {}
    assert [size["size_bytes"] for size in result["sizes"]] == sizes
    for size in result["sizes"]:
        check_size(size, ranks)


@pytest.mark.quick
def test_under_mpiexec_it_takes_the_ranks_it_finds():
    done = odc_mpi(2, *SMALL)
    assert done.code == 0, done.err
    assert "2 ranks on 1 node" in done.out
    assert "measuring units of 2M" in done.err


def test_ranks_that_differ_from_mpiexec_are_a_user_error():
    done = odc_mpi(2, *SMALL, "--ranks", 3)
    assert done.code == 2
    errors = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert errors == ["odc-mpi: error: --ranks 3: mpiexec started 2 ranks: remove --ranks"]
    assert "Traceback" not in done.err


def test_too_large_units_are_reported_and_the_exit_code_passes_through():
    done = odc_mpi(0, "bench", "transport", "--sizes", "4096G", "--repeats", 1)
    assert done.code == 2
    assert len([line for line in done.err.splitlines() if "MiB of memory are available" in line]) == 1
    assert "Traceback" not in done.err


def running(ranks):
    """Start a benchmark that takes long, and return it with its ranks once it measures."""
    process = start(0, "-m", "odc_mpi", "bench", "transport", "--ranks", ranks, "--sizes", "1M", "--repeats", 100000)
    for line in process.stderr:
        if "measuring" in line:
            break
    pids = [pid for pid, words in descendants(process.pid).items() if is_python(words)]
    assert len(pids) == ranks
    return process, pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all(number):
    before = directories()
    process, pids = running(2)
    process.send_signal(number)
    assert finish(process, 40).code == 130
    check_nothing_left(pids, before)


def test_a_killed_rank_ends_all():
    before = directories()
    process, pids = running(3)
    os.kill(pids[1], signal.SIGKILL)
    assert finish(process, 60).code != 0
    check_nothing_left(pids, before)


def check_nothing_left(pids, before):
    # Open MPI's launcher may end a moment before the last of what it killed.
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert directories() <= before


def test_it_ends_at_its_deadline():
    done = odc_mpi(0, "bench", "transport", "--sizes", "1M", "--repeats", 100000, "--timeout-s", 5)
    assert done.code == 1
    assert "odc-mpi: error: 2 ranks did not end within 5 s: raise --timeout-s" in done.err
