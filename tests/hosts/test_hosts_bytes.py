"""Two hosts with two ranks each: caches and islands on the hosts reduce what crosses the network, and change no bit."""

import json
import math

import pytest
from mpi_launch import script
from small_run import write_config
from two_hosts import launch

from odc_mpi.checkpoint.commands import open_newest_checkpoint

# Bytes that a host receives, by Ethernet's counters, while all ranks fetch all units of four minibatches.
CROSSES = """
import numpy as np, torch
from mpi4py import MPI
from pathlib import Path
from odc_mpi import CommConfig, World
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
world = World(timeout_s=30)
counter = Path("/sys/class/net/eth0/statistics/rx_bytes")
for node_cache, trainable in ("off", True), ("auto", True), ("auto", False):
    transport = window_transport(world, comm=CommConfig(node_cache=node_cache, progress="thread"))
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
        print("received", int(counter.read_text()) - before, MPI.Get_library_version()[:5])
    transport.close()
world.close()
"""
# Runs after each other. Three are resumed, one of them with other islands and without any. One has a host, and the
# last a rank for itself.
TRAINS = """
import sys
from pathlib import Path
from odc_mpi.runtime.world import World
from odc_mpi.training.train import train
from odc_mpi.training.settings import load

top = Path(sys.argv[1]).parent
common = ["--run.exact=true", "--data.max_tokens_per_microbatch=32", "--data.minibatch_sequences=16"]
common += ["--run.eval_every=1", f"--data.eval_path={sys.argv[2]}"]
outer = ["--islands.mode=outer", "--islands.sync_every=4", "--islands.fragments=2", "--islands.delay=1"]
outer += ["--islands.wire=e3m0", "--run.checkpoint_every=3", "--run.eval_every=5"]
RUNS = [
    ("off", 4, "--comm.node_cache=off"),
    ("auto", 2, "--comm.node_cache=auto"),
    ("auto", 4, "--comm.node_cache=auto"),
    ("islands", 4, "--islands.by=node"),
    ("moved", 2, "--islands.by=node", "--data.balance=dynamic"),
    ("moved", 3, "--islands.by=1", "--data.balance=dynamic"),
    ("moved", 4, "--data.balance=dynamic"),
    ("outer", 5, "--islands.by=node", *outer),
    ("outer_again", 5, "--islands.by=node", *outer, f"--run.resume={top}/outer/islands/0/checkpoints/step_00000004"),
    ("outer_on_host", 5, "--islands.by=1", *outer),
    ("alone", 4, "--data.balance=dynamic"),
]
with World(timeout_s=60) as world:
    host, self_world = world.split(world.node), world.split(world.rank)
    for name, steps, *way in RUNS:
        ranks, directory = (host, f"{name}{world.node}") if name == "outer_on_host" else (world, name)
        if name == "alone":
            ranks, directory = self_world, f"{name}{world.rank}"
        words = [f"--run.dir={top / directory}", f"--run.steps={steps}", *common, *way]
        train(load(Path(sys.argv[1]), words), ranks)
"""
SINGLE_RANK = [f"alone{rank}" for rank in range(4)]


@pytest.mark.library
def test_a_host_receives_each_byte_once(tmp_path):
    done = launch(2, script(tmp_path, CROSSES), timeout_s=90)
    assert done.code == 0, done.err
    each, shared, frozen = (int(line.split()[1]) for line in done.out.splitlines())
    # Open MPI's request for an MPI_Get over TCP is as long as the data.
    assert 1 <= each / (2 * 4 * 4 * (2 << 20)) < (1.15 if "MPICH" in done.out else 2.15), done.out
    assert shared <= 0.55 * each, done.out
    assert frozen <= 0.3 * shared, done.out


@pytest.mark.timeout(500)
def test_caches_and_islands_reduce_the_bytes_and_change_no_bit(data, tmp_path):
    """With several microbatches of a rank in a step, and evaluations between the steps."""
    done = launch(2, script(tmp_path, TRAINS), write_config(data, tmp_path), data, timeout_s=480)
    assert done.code == 0, done.err
    assert done.out.count("once per node") == 3, done.out
    assert done.out.count("islands 2, each with all parameters: ranks 0-1, 2-3") == 4, done.out
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")}
    digests = {name: run["parameters_digest"] for name, run in runs.items()}
    assert len({digests[name] for name in ("off", "auto", "islands", "moved", *SINGLE_RANK)}) == 1
    assert len({digests[name] for name in ("outer", "outer_again", "outer_on_host0", "outer_on_host1")}) == 1
    assert len(digests) == 12 and digests["outer"] != digests["off"]
    fetched, pushed = (
        {name: run[f"bytes_{did}_other_nodes"] for name, run in runs.items()} for did in ("fetched", "pushed")
    )
    assert 0 < fetched["auto"] <= 0.55 * fetched["off"] and pushed["auto"] == pushed["off"]
    crossing = {name: fetched[name] + pushed[name] for name in runs}
    assert 0 < crossing["islands"] <= 0.51 * crossing["off"] and crossing["islands"] <= 0.68 * crossing["auto"]
    assert runs["islands"]["bytes_between_islands"] == pytest.approx(crossing["islands"], rel=1e-6)
    # Five steps merge each of the two halves of the parameters twice, in 17 bytes for 32 elements.
    with open_newest_checkpoint(tmp_path / "outer") as checkpoint:
        tensors = checkpoint.manifest.tensors
        numel = sum(math.prod(tensors[path].shape) for path in tensors if path.startswith("outer/momentum_buffer/"))
    assert runs["outer"]["bytes_between_islands"] == pytest.approx(2 * numel / 2 * 17 / 32 / 5, rel=0.02)
    assert crossing["outer"] == crossing["outer_again"] == 0
