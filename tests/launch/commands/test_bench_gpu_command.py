"""`odc-mpi bench gpu` as a person runs it: without a GPU, and with host memory in a GPU's place where it crashes."""

import json
import os

import pytest
import yaml
from mpi_launch import ROOT, launch, odc_mpi
from small_run import MODEL

from odc_mpi.stack.gpu import has_gpu

COMMAND = """
import sys
from odc_mpi.cli import main as cli
from odc_mpi.bench.gpu import run as gpu_command
gpu_command.run.__defaults__ = ([sys.executable, sys.argv.pop(1)],)
sys.exit(cli.main(sys.argv[1:]))
"""
#: A child on host memory, of which one rank goes wrong at the last size.
CHILD = """
import os, signal
from late_device import LateDevice
from odc_mpi import api
from odc_mpi.bench.gpu import child as gpu_child, kernels as gpu_kernels, windows as gpu_windows
from odc_mpi.runtime.start.launch import run_child
device = LateDevice(copy_s=0.0)
api.find_device = lambda *_: device
gpu_child.find = lambda _: device
for module in (gpu_windows, gpu_kernels):
    module.UNITS_BYTES, module.SAMPLE_S = 8000, 0.001
measure_size = gpu_windows.measure_size
def failing(world, device, num_bytes, repeats, reductions=()):
    if num_bytes == 800 and bool(reductions) == {with_windows} and world.rank == {rank}:
        {fault}
    return measure_size(world, device, num_bytes, repeats, reductions)
gpu_windows.measure_size = failing
run_child(gpu_child.main)
"""
SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"
RAISE = "raise RuntimeError('made to fail')"
NOTHING = "pass"


@pytest.fixture
def bench(tmp_path, data):
    config = {
        "model": {"config": MODEL, "param_dtype": "bfloat16"},
        "data": {"path": str(data), "minibatch_sequences": 3, "max_tokens_per_microbatch": 64},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "command.py").write_text(COMMAND)

    def run(fault, *options, rank=1, with_windows=True):
        (tmp_path / "child.py").write_text(CHILD.format(fault=fault, rank=rank, with_windows=with_windows))
        words = ["bench", "gpu", "--sizes", "4000,800", "--repeats", 1, "--steps", 1, "--window-device", "cuda"]
        words += ["--config", tmp_path / "config.yaml", *options]
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "stand_ins")))
        return launch(
            2, tmp_path / "command.py", tmp_path / "child.py", *words, PYTHONPATH=paths, XDG_CACHE_HOME=tmp_path
        )

    return run


def test_the_whole_benchmark_prints_one_object(bench):
    done = bench(NOTHING, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["benchmark"], result["ranks"], result["repeats"]) == ("gpu", 2, 1)
    assert list(result["left_out"]) == ["kernels"]
    assert len(result["sizes"]) == len(result["kernels"]) == 2
    assert all(len(size["variants"]) == 10 for size in result["sizes"])
    assert set(result["step"]["overhead"]) == {"host_windows", "device_windows"}
    said = [line for line in done.err.splitlines() if line.startswith("odc-mpi: measuring")]
    assert said[-1] == "odc-mpi: measuring steps, round 1 of 1: plain"


def test_a_crash_of_windows_on_gpus_costs_nothing_else(bench):
    done = bench(SEGFAULT, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["left_out"]["device_windows"] == "units of 800 with windows on GPUs: crashed (SIGSEGV on rank 1)"
    assert [len(size["variants"]) for size in result["sizes"]] == [10, 7]
    assert len(result["kernels"]) == 2 and set(result["step"]["overhead"]) == {"host_windows"}


def test_another_crash_is_a_failure_that_shows_what_is_known(bench):
    done = bench(RAISE, with_windows=False)
    assert done.code == 1
    assert "odc-mpi: error: units of 800: crashed (exit code 1 on rank 1)" in done.err
    assert "made to fail" in done.err
    assert "4000" in done.out and "A step" not in done.out


def test_other_ranks_than_mpiexec_started_are_a_mistake(bench):
    done = bench(NOTHING, "--ranks", 3)
    assert done.code == 2
    told = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert told == ["odc-mpi: error: --ranks 3: mpiexec started 2, leave --ranks out under it"]
    assert "Traceback" not in done.err and not done.out


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("ranks", [0, 2])
def test_without_a_gpu_it_is_one_line(ranks):
    done = odc_mpi(ranks, "bench", "gpu")
    assert done.code == 2
    told = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert len(told) == 1, done.err
    assert told[0].startswith("odc-mpi: error: bench gpu: expected ")
    assert "Traceback" not in done.err and not done.out
