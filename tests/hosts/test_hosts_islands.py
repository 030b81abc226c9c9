"""Two hosts with two ranks each as two islands: half of the bytes cross the network, and no bit changes."""

import json

import pytest
from mpi_launch import script
from small_run import write_config
from two_hosts import launch

# Runs after each other. The last one stops after half of its steps, and goes on with islands of one rank.
TRAINS = """
import sys
from pathlib import Path
from odc_mpi.runtime.world import World
from odc_mpi.training.run import train
from odc_mpi.training.settings import load

common = ["--run.exact=true", "--data.max_tokens_per_microbatch=32", "--data.minibatch_sequences=16"]
common += ["--run.eval_every=1", f"--data.eval_path={sys.argv[2]}"]
RUNS = [
    ("flat", 4, "--comm.node_cache=off"),
    ("cached", 4, "--comm.node_cache=auto"),
    ("islands", 4, "--islands.by=node"),
    ("moved", 2, "--islands.by=node"),
    ("moved", 4, "--islands.by=1"),
]
with World(timeout_s=60) as world:
    for name, steps, way in RUNS:
        words = [f"--run.dir={Path(sys.argv[1]).with_name(name)}", f"--run.steps={steps}", way, *common]
        train(load(Path(sys.argv[1]), words), world)
"""


@pytest.mark.library
@pytest.mark.timeout(200)
def test_islands_exchange_half_the_bytes_and_give_the_same_bits(data, tmp_path):
    done = launch(2, script(tmp_path, TRAINS), write_config(data, tmp_path), data, timeout_s=180)
    assert done.code == 0, done.err
    assert done.out.count("islands 2, each with all parameters: ranks 0-1, 2-3") == 2, done.out
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")}
    assert len({run["parameters_digest"] for run in runs.values()}) == 1
    crossing = {name: run["bytes_fetched_other_nodes"] + run["bytes_pushed_other_nodes"] for name, run in runs.items()}
    assert 0 < crossing["islands"] <= 0.51 * crossing["flat"]
    assert crossing["islands"] <= 0.68 * crossing["cached"]
    assert runs["islands"]["bytes_between_islands"] == pytest.approx(crossing["islands"], rel=1e-6)
