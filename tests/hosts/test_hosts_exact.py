"""An exact run across two hosts gives the bits of a run on one rank: the short form of `make soak`'s."""

import json

import pytest
from mpi_launch import launch as launch_here
from small_run import write_config
from two_hosts import launch

STEPS = 4


@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
def test_two_hosts_change_no_bit(data, tmp_path, reduction):
    digests = []
    for name, begin in (
        ("alone", lambda *a: launch_here(1, *a)),
        ("hosts", lambda *a: launch("2,1", *a, timeout_s=100)),
    ):
        (tmp_path / name).mkdir()
        config = write_config(data, tmp_path / name)
        exact = ("--run.exact", "true", "--run.steps", STEPS, "--comm.timeout_s", 60, "--data.balance", "dynamic")
        done = begin("-m", "odc_mpi", "train", "--config", config, *exact, "--comm.reduction", reduction)
        assert done.code == 0, done.err
        digests.append(json.loads((tmp_path / name / "run/summary.json").read_text())["parameters_digest"])
    assert digests[0] == digests[1]
