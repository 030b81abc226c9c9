"""Scripts of `benchmarks/` run and print their object. No figure is compared with another here."""

import json

import pytest
from mpi_launch import ROOT, launch

from odc_mpi.runtime.start.start_times import PHASES

pytestmark = pytest.mark.slow


def printed(script, *words, ranks=2):
    done = launch(ranks, ROOT / "benchmarks" / script, *words, timeout_s=200)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def test_checkpoint(tmp_path):
    result = printed("checkpoint.py", "--size", "1M", "--repeats", 1, "--dir", tmp_path)
    assert len(result["variants"]) == 7 and len(result["goals"]) == 5
    assert not list(tmp_path.iterdir())


def test_rollout_schedules():
    """No schedule exceeds the bound, and sharing pays."""
    result = printed("rollout_schedules.py", "--speed-variation", 0.1, "--minibatches", 6, "--json", ranks=0)
    barrier, pool, on_demand, bound = result["speedup"].values()
    assert barrier == 1 < pool < on_demand < bound and on_demand > max(1.13, 0.97 * bound)
    assert result["idle_fraction"]["collective/barrier"] == pytest.approx(0.14, abs=0.03)
    assert 0.4 < result["generation_fraction"] < 0.75


def test_load_speed(tmp_path):
    """Each of two ranks reads its half of a model, and at most a part of a row more for each slice."""
    result = printed("load_speed.py", "--gigabytes", 0.01, "--dir", tmp_path)
    half = result["file_bytes"] / 2
    assert len(result["ranks"]) == 2
    assert all(half <= rank["requested_bytes"] <= 1.05 * half for rank in result["ranks"])
    assert not list(tmp_path.iterdir())


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
