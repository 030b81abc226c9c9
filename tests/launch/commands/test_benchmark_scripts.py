"""Scripts of `benchmarks/` as a person starts them; short runs are in tests/mpi/benchmarks/test_program_runs.py."""

import json

import pytest
from mpi_launch import ROOT, launch

from odc_mpi.runtime.start.start_times import PHASES

BESIDE = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
# One contender takes longer than the others may wait.
SLOW = """
import sys, time
import train_speed
def slow():
    time.sleep(60)
    return train_speed.idle()
train_speed._Contenders._unsharded = lambda self: slow
sys.exit(train_speed.main())
"""


def test_a_user_error_of_the_ranks_is_one_line(tmp_path):
    done = launch(2, ROOT / "benchmarks" / "train_speed.py", "--config", "nowhere.yaml", cwd=tmp_path)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert "nowhere.yaml" in line and "Traceback" not in done.err


@pytest.mark.timeout(240)
def test_a_wait_has_the_limit_of_the_program(config, tmp_path):
    """The second rank waits for the first, which takes 60 s: more than it may, and the message says what to change."""
    (tmp_path / "script.py").write_text(SLOW)
    words = ["--steps", 1, "--repeats", 1, "--config", config, "--timeout-s", 10]
    done = launch(2, tmp_path / "script.py", *words, timeout_s=200, cwd=tmp_path, **BESIDE)
    assert done.code != 0
    assert "waited more than 10 s while ending ceiling" in done.err
    assert "the limit is --timeout-s" in done.err and "comm.timeout_s" not in done.err


@pytest.mark.timeout(240)
def test_start(config):
    """The median of one phase that does not communicate is that of its seconds with a core for each rank."""
    words = ["--config", config, "--ranks", "2,3", "--json"]
    done = launch(0, ROOT / "benchmarks" / "start.py", *words, timeout_s=200)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    starts, cores = result["starts"], result["cores"]
    assert [start["ranks"] for start in starts] == [2, 3]
    for start in starts:
        assert list(start["start_s"]) == [*PHASES, "total"] and start["host_bytes"] > 1 << 20
        *phases, total = start["start_s"].values()
        assert max(phases) <= total <= sum(phases) + 0.01
        assert all(start["start_s"][phase] > 0 for phase in ("imports", "mpi", "inputs", "windows", "first_step"))
    imports_s = [start["start_s"]["imports"] * min(1, cores / start["ranks"]) for start in starts]
    assert result["predicted_s"]["imports"] == pytest.approx(sum(imports_s) / 2)
