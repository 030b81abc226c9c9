"""Scripts of `benchmarks/` run and print their object. No figure is compared with another here."""

import json

import pytest
from mpi_launch import ROOT, launch
from train_speed import CONTENDERS

from odc_mpi.runtime.start.start_times import PHASES

HEADER = ["benchmark", "library", "ranks", "nodes"]
VARIANTS = {
    *("memcpy", "fetch_zero_copy", "fetch_copy", "mpi_allgather"),
    *("push_accumulate", "push_mailbox", "mpi_reduce_scatter"),
}
# Programs that take little, one after the other: a start takes longer than each. Rank 0 alone prints.
SEVERAL = """
import contextlib, importlib, io, json, sys
results = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = [name, *words]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert not importlib.import_module(name).main()
    if output.getvalue():
        results[name] = json.loads(output.getvalue().splitlines()[-1])
if results:
    print(json.dumps(results))
"""
SHORT = {
    "split_speed": ["--length", "64", "--steps", "1", "--repeats", "1"],
    "checkpoint": ["--size", "1M", "--repeats", "1", "--dir", "."],
    "load_speed": ["--gigabytes", "0.01", "--dir", "."],
}
BESIDE = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
# One contender takes longer than the others may wait.
SLOW = """
import sys, time
import train_speed
def slow():
    time.sleep(90)
    return train_speed.idle()
train_speed._Contenders._unsharded = lambda self: slow
sys.exit(train_speed.main())
"""


def printed(script, *words, ranks=2, **options):
    done = launch(ranks, ROOT / "benchmarks" / script, *words, timeout_s=200, **options)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.quick
def test_transport_speed():
    """Few operations of each kind, and units of which the last of three ranks owns nothing, 25 elements."""
    result = printed("transport_speed.py", "--sizes", "2M,100", "--repeats", 2, "--json", ranks=3)
    assert list(result) == [*HEADER, "cores_per_rank", "repeats", "dtype", "load_average", "sizes"]
    assert (result["benchmark"], result["ranks"], result["nodes"], result["repeats"]) == ("transport", 3, 1, 2)
    assert [size["size_bytes"] for size in result["sizes"]] == [2 << 20, 100]
    for size in result["sizes"]:
        assert list(size) == ["size_bytes", "num_units", "crossing_bytes", "all_at_once"]
        assert 0 <= size["crossing_bytes"] < size["size_bytes"] and size["num_units"] > 1
        assert set(size["all_at_once"]) == VARIANTS
        for name, entry in size["all_at_once"].items():
            assert list(entry) == ["seconds", "gb_per_s", "of_memcpy"]
            assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"]
            moves = name != "fetch_zero_copy"
            assert [entry[key] is not None for key in ("gb_per_s", "of_memcpy")] == [moves, moves]
        assert size["all_at_once"]["memcpy"]["of_memcpy"] == 1


def test_transport_speed_prints_tables_on_one_rank():
    done = launch(1, ROOT / "benchmarks" / "transport_speed.py", "--sizes", "2M,100", "--repeats", 2)
    assert done.code == 0, done.err
    assert "1 rank on 1 node" in done.out and "measuring units of 2M" in done.err


@pytest.mark.timeout(240)
def test_train_speed(config, tmp_path):
    result = printed("train_speed.py", "--steps", 1, "--repeats", 1, "--config", config, "--json", cwd=tmp_path)
    for key in ("tokens_per_s", "quartiles", "ratio_to_fsdp2", "ratio_to_ceiling", "loss_deviation"):
        assert set(result[key]) == set(CONTENDERS), key
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["ratio_to_fsdp2"]["fsdp2"] == result["ratio_to_ceiling"]["ceiling"] == 1.0
    assert (result["benchmark"], result["ranks"], result["steps"], result["repeats"]) == ("train", 2, 1, 1)
    assert len(result["losses"]) == 2 and len(result["load_average"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {config.name}, "a benchmark leaves no run behind"


@pytest.fixture(scope="module")
def short_results(tmp_path_factory):
    """The objects of `SHORT` on two ranks; they leave nothing in their directory."""
    directory = tmp_path_factory.mktemp("short")
    done = launch(2, "-c", SEVERAL, json.dumps(SHORT), timeout_s=200, cwd=directory, **BESIDE)
    assert done.code == 0, done.err
    assert not list(directory.iterdir())
    return json.loads(done.out.splitlines()[-1])


def test_split_speed(short_results):
    """Both train the same, and each sequence is split over the two ranks."""
    result = short_results["split_speed"]
    assert result["num_cut_sequences"] == result["num_sequences"] == 2 and result["loss_deviation"] < 1e-5
    assert result["ratio"]["median"] > 0 and set(result["tokens_per_s"]) == {"dynamic", "split"}


def test_a_user_error_of_the_ranks_is_one_line(tmp_path):
    done = launch(2, ROOT / "benchmarks" / "train_speed.py", "--config", "nowhere.yaml", cwd=tmp_path)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert "nowhere.yaml" in line and "Traceback" not in done.err


@pytest.mark.timeout(240)
def test_a_wait_has_the_limit_of_the_program(config, tmp_path):
    """The second rank waits for the first, which takes 90 s: more than it may, and the message says what to change."""
    (tmp_path / "script.py").write_text(SLOW)
    words = ["--steps", 1, "--repeats", 1, "--config", config, "--timeout-s", 20]
    done = launch(2, tmp_path / "script.py", *words, timeout_s=200, cwd=tmp_path, **BESIDE)
    assert done.code != 0
    assert "waited more than 20 s while ending ceiling" in done.err
    assert "the limit is --timeout-s" in done.err and "comm.timeout_s" not in done.err


def test_checkpoint(short_results):
    result = short_results["checkpoint"]
    assert len(result["variants"]) == 7 and len(result["goals"]) == 5


def test_rollout_schedules():
    """No schedule exceeds the bound, and sharing pays."""
    result = printed("rollout_schedules.py", "--speed-variation", 0.1, "--minibatches", 6, "--json", ranks=0)
    barrier, pool, on_demand, stale_1, stale_2, bound = result["speedup"].values()
    assert barrier == 1 < pool < on_demand < bound and on_demand > max(1.13, 0.97 * bound)
    assert 1.1 * on_demand < stale_1 < stale_2
    assert result["idle_fraction"]["collective/barrier"] == pytest.approx(0.14, abs=0.03)
    assert 0.4 < result["generation_fraction"] < 0.75


def test_rollout_speed():
    """On real ranks, as in the simulation, decoding for later steps pays, and no completion is older than allowed."""
    options = ("--per-rank", 2, "--completions", 4, "--minibatches", 4, "--scale", 0.004, "--staleness", 1, "--json")
    result = printed("rollout_speed.py", *options, ranks=2)["staleness"]
    assert result["0"]["staleness_max"] == 0 and result["1"]["staleness_max"] == 1
    assert result["1"]["simulated"] > 1 and result["1"]["step_s"] > 0.5 * result["1"]["simulated_s"]


def test_load_speed(short_results):
    """Each of two ranks reads its half of a model, and at most a part of a row more for each slice."""
    result = short_results["load_speed"]
    half = result["file_bytes"] / 2
    assert len(result["ranks"]) == 2
    assert all(half <= rank["requested_bytes"] <= 1.05 * half for rank in result["ranks"])


@pytest.mark.timeout(240)
def test_start(config):
    """The median of one phase that does not communicate is that of its seconds with a core for each rank."""
    result = printed("start.py", "--config", config, "--ranks", "2,3", "--json", ranks=0)
    starts, cores = result["starts"], result["cores"]
    assert [start["ranks"] for start in starts] == [2, 3]
    for start in starts:
        assert list(start["start_s"]) == [*PHASES, "total"] and start["host_bytes"] > 1 << 20
        *phases, total = start["start_s"].values()
        assert max(phases) <= total <= sum(phases) + 0.01
        assert all(start["start_s"][phase] > 0 for phase in ("imports", "mpi", "inputs", "windows", "first_step"))
    imports_s = [start["start_s"]["imports"] * min(1, cores / start["ranks"]) for start in starts]
    assert result["predicted_s"]["imports"] == pytest.approx(sum(imports_s) / 2)
