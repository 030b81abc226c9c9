"""`odc-mpi bench train` from a shell: schema, user errors, how it ends. No figure is compared with another here."""

import json

import pytest
from mpi_launch import launch, odc_mpi

from odc_mpi.bench.train import CONTENDERS

BY_CONTENDER = ("tokens_per_s", "quartiles", "ratio_to_fsdp2", "ratio_to_ceiling", "loss_deviation")
TINY = ("bench", "train", "--steps", 1, "--repeats", 1)

# One contender takes longer than others may wait, as another limit than the command's own would have it.
SLOW = """
import sys, time
from odc_mpi.cli import main as cli
from odc_mpi.bench import train
def slow():
    time.sleep(90)
    return train.idle()
train._Contenders._unsharded = lambda self: slow
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.timeout(240)
def test_it_starts_its_ranks_and_prints_one_object(config, tmp_path):
    done = odc_mpi(0, *TINY, "--config", config, "--json", timeout_s=200, cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    for key in BY_CONTENDER:
        assert set(result[key]) == set(CONTENDERS), key
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["ratio_to_fsdp2"]["fsdp2"] == result["ratio_to_ceiling"]["ceiling"] == 1.0
    assert (result["benchmark"], result["ranks"], result["steps"], result["repeats"]) == ("train", 2, 1, 1)
    assert len(result["losses"]) == 2 and len(result["load_average"]) == 2
    assert "measuring round 1 of 1" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {config.name}, "a benchmark leaves no run behind"


def test_a_user_error_of_the_ranks_is_one_line(tmp_path):
    done = odc_mpi(0, *TINY, "--config", "nowhere.yaml", cwd=tmp_path)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert "nowhere.yaml" in line and "Traceback" not in done.err


@pytest.mark.timeout(240)
def test_a_wait_has_the_limit_of_the_command(config, tmp_path):
    """The second rank waits for the first, which takes 90 s: more than it may, and the message says what to change."""
    (tmp_path / "script.py").write_text(SLOW)
    words = [*TINY, "--config", config, "--timeout-s", 20]
    done = launch(2, tmp_path / "script.py", *words, timeout_s=200, cwd=tmp_path)
    assert done.code != 0
    assert "waited more than 20 s while ending ceiling" in done.err
    assert "the limit is --timeout-s" in done.err and "comm.timeout_s" not in done.err
