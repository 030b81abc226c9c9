"""`odc-mpi bench start` from a shell. No figure is compared with another here."""

import json

import pytest
from mpi_launch import odc_mpi

from odc_mpi.runtime.start.start_times import PHASES


@pytest.mark.timeout(240)
def test_starts_on_two_and_three_ranks_have_all_phases_and_equal_losses(config, tmp_path):
    done = odc_mpi(0, "bench", "start", "--config", config, "--ranks", "2,3", "--json", timeout_s=200, cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    two, three = result["starts"]
    assert (two["ranks"], three["ranks"]) == (2, 3) and len(two["losses"]) == result["steps"]
    assert two["losses"] == pytest.approx(three["losses"], rel=1e-5)
    for start in (two, three):
        assert list(start["start_s"]) == [*PHASES, "total"] and start["host_bytes"] > 1 << 20
        *phases, total = start["start_s"].values()
        assert max(phases) <= total <= sum(phases) + 0.01
        assert all(start["start_s"][phase] > 0 for phase in ("imports", "mpi", "inputs", "windows", "first_step"))
    assert set(result["predicted_s"]) == {*PHASES, "total"}
    assert {path.name for path in tmp_path.iterdir()} == {config.name}, "no run is left behind"
