"""A rank that computes is read and pushed to from the other host all the same, and the doctor knows what that takes."""

import json

import pytest
from mpi_launch import script
from two_hosts import launch

pytestmark = pytest.mark.library

# The last rank computes for 3 s without calling MPI; those of the other host come and go meanwhile.
COMPUTES = r"""
import sys, time
import numpy as np, torch
from odc_mpi import CommConfig, World
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
torch.set_num_threads(1)
world = World(timeout_s=25)
transport = window_transport(world, comm=CommConfig(reduction=sys.argv[1], progress="thread"))
numel = 50_000 * world.size
transport.allocate([FlatLayout.build("unit", [ParameterSpec("p", (numel,), True)], world.size)])
transport.parameters.shard(0).fill_(world.rank + 1)
transport.publish_parameters()
transport.parameters.release(transport.parameters.fetch(0).wait())
transport.publish_parameters()
began, rounds, longest = time.perf_counter(), 0, 0.0
if world.rank == world.size - 1:
    matrix = torch.randn(64, 64)
    with world.background_progress_off():
        while time.perf_counter() - began < 3.0:
            matrix @ matrix
elif world.node == 0:
    time.sleep(0.3)
    while time.perf_counter() - began < 2.2:
        start = time.perf_counter()
        fetched = transport.parameters.fetch(0).wait()
        assert fetched[0] == 1 and fetched[-1] == world.size
        transport.gradients.push(0, torch.ones(numel)).wait()
        transport.parameters.release(fetched)
        rounds, longest = rounds + 1, max(longest, time.perf_counter() - start)
    sys.stdout.write(f"{rounds} {longest}\n")  # in one piece: the ranks share a pipe
    sys.stdout.flush()
reports = transport.complete_gradients(np.array([rounds]))
first, last = transport.parameters.layouts[0].owned(world.rank)
assert (transport.gradients.shard(0)[: last - first] == reports.sum()).all(), "gradients were lost or doubled"
world.close()
"""


@pytest.mark.parametrize(("reduction", "ranks_per_host"), [("accumulate", 1), ("mailbox", 2)])
def test_no_rank_waits_for_a_computing_rank_of_the_other_host(tmp_path, reduction, ranks_per_host):
    done = launch(ranks_per_host, script(tmp_path, COMPUTES), reduction, timeout_s=60)
    assert done.code == 0, done.err
    for line in done.out.splitlines():
        rounds, longest = line.split()
        # Open MPI takes up to a second for an Accumulate of this size over TCP, also with an idle target.
        assert int(rounds) >= 2 and float(longest) < 2.0, done.out
    assert len(done.out.splitlines()) == ranks_per_host


def test_the_doctor_sees_that_the_other_host_needs_progress():
    done = launch(2, "-m", "odc_mpi", "doctor", "--json", timeout_s=90)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["nodes"] == 2 and list(report["ranks_per_node"]) == [2, 2]
    peers = report["peers"]
    assert peers["other_node"]["get"]["one_sided"] is False
    assert peers["other_node"]["get"]["busy_s"] > 10 * peers["other_node"]["get"]["idle_s"] > 0
    assert peers["other_node"]["put"]["gb_per_s"] > 0
    assert report["decision"]["progress"]["choice"] == "thread"
    assert peers["same_node"]["get"]["one_sided"] is True
