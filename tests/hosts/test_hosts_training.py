"""A training run across two hosts gives the losses of a run in one process."""

import json

import pytest
from mpi_launch import launch as launch_here
from small_run import write_config
from two_hosts import launch

#: Settings of the communication that a run across hosts must work with.
SETTINGS = [
    (),
]


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The losses of one process."""
    directory = tmp_path_factory.mktemp("alone")
    done = launch_here(0, "-m", "odc_mpi", "train", "--config", write_config(data, directory))
    assert done.code == 0, done.err
    return losses(directory / "run")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings) or "as it comes")
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_losses_are_those_of_one_process(config, alone, tmp_path, ranks_per_host, settings):
    # A wait that hangs names itself; four ranks on two busy cores took up to 45 s for all.
    command = ("-m", "odc_mpi", "train", "--config", config, "--comm.timeout_s", 60)
    done = launch(ranks_per_host, *command, *settings, timeout_s=100)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 * ranks_per_host
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)
