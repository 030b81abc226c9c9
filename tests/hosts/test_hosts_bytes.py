"""Two hosts with two ranks each: caches on the hosts halve what is fetched over the network, and change no bit.

Frozen parameters are fetched once in all.
"""

import json

import pytest
from mpi_launch import script
from small_run import write_config
from two_hosts import launch

# Bytes that a host receives, by Ethernet's counters, while all ranks fetch all units of four minibatches.
CROSSES = """
import numpy as np, torch
from pathlib import Path
from odc_mpi import World
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
world = World(timeout_s=30)
counter = Path("/sys/class/net/eth0/statistics/rx_bytes")
for node_cache, trainable in (False, True), (True, True), (True, False):
    transport = window_transport(world, node_cache=node_cache, progress=True)
    units = [FlatLayout.build(f"unit{i}", [ParameterSpec("p", (1 << 20,), trainable)], world.size) for i in range(4)]
    transport.allocate(units)
    before = int(counter.read_text())
    for number in range(4):
        for index in range(4):
            transport.parameters.shard(index).fill_(number if trainable else 7)
        transport.publish_parameters()
        for index in range(4):
            fetched = transport.parameters.fetch((index + world.rank) % 4).wait()
            assert (fetched == (number if trainable else 7)).all(), fetched
            transport.parameters.release(fetched)
        transport.complete_gradients(np.zeros(1))
    if world.rank == 0:
        print("received", int(counter.read_text()) - before)
    transport.close()
world.close()
"""
# Two runs after each other. That with caches stops after half of its steps, and goes on from its checkpoint.
TRAINS = """
import sys
from pathlib import Path
from odc_mpi.runtime.world import World
from odc_mpi.training.run import train
from odc_mpi.training.settings import load

common = ["--run.exact=true", "--data.max_tokens_per_microbatch=32", "--data.minibatch_sequences=16"]
common += ["--run.eval_every=1", f"--data.eval_path={sys.argv[2]}"]
with World(timeout_s=60) as world:
    for name, steps in (("off", 4), ("auto", 2), ("auto", 4)):
        place = Path(sys.argv[1]).with_name(name)
        words = [f"--run.dir={place}", f"--run.steps={steps}", f"--comm.node_cache={name}", *common]
        train(load(Path(sys.argv[1]), words), world)
"""


@pytest.mark.library
def test_a_host_receives_each_byte_once(tmp_path):
    done = launch(2, script(tmp_path, CROSSES), timeout_s=90)
    assert done.code == 0, done.err
    each, shared, frozen = (int(line.split()[1]) for line in done.out.splitlines())
    assert each >= 2 * 4 * 4 * (2 << 20) and shared <= 0.55 * each, done.out
    assert frozen <= 0.3 * shared, done.out


@pytest.mark.library
@pytest.mark.timeout(200)
def test_a_run_fetches_half_as_much_and_gives_the_same_bits(data, tmp_path):
    """With several microbatches of a rank in a step, and evaluations between the steps."""
    done = launch(2, script(tmp_path, TRAINS), write_config(data, tmp_path), data, timeout_s=180)
    assert done.code == 0, done.err
    assert done.out.count("once per node") == 2, done.out
    off, auto = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("off", "auto"))
    assert auto["parameters_digest"] == off["parameters_digest"]
    assert 0 < auto["bytes_fetched_other_nodes"] <= 0.55 * off["bytes_fetched_other_nodes"]
    assert auto["bytes_pushed_other_nodes"] == off["bytes_pushed_other_nodes"]
