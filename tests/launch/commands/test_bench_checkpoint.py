"""`odc-mpi bench checkpoint` as a person runs it. No figure is compared with another here."""

import json

from mpi_launch import odc_mpi

VARIANTS = {f"{what}_{who}" for what in ("write", "read") for who in ("plain", "odc_mpi", "dcp")} | {"pause"}


def test_it_measures_and_leaves_nothing(tmp_path):
    done = odc_mpi(0, "bench", "checkpoint", "--size", "1M", "--repeats", 1, "--dir", tmp_path, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["ranks"] == 2 and result["state_bytes"] >= 1 << 20
    assert set(result["variants"]) == VARIANTS
    assert all(entry["seconds"]["median"] > 0 for entry in result["variants"].values())
    assert len(result["goals"]) == 5
    assert not list(tmp_path.iterdir())
