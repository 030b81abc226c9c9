"""`odc-mpi bench progress` as a person runs it. No figure is compared with another here."""

import json

import pytest
from mpi_launch import launch, odc_mpi

SMALL = ("bench", "progress", "--sizes", "64,100K", "--push-sizes", "100K,400", "--repeats", 1)
KEYS = [
    *("benchmark", "library", "ranks", "nodes", "repeats", "cores", "target", "other_node"),
    *("mpich_async_progress", "load_average", "get", "politeness", "reduction", "goals"),
]


TAKES_A_CORE = """
import os
from pathlib import Path
import torch
from odc_mpi import World
from odc_mpi.bench.progress.computing import take_one_core_each
world = World(timeout_s=30)
torch.set_num_threads(2)
(torch.ones(300, 300) @ torch.ones(300, 300)).sum()  # some threads to bind, besides MPI's and the watchdog's
before = os.sched_getaffinity(0)
cores = take_one_core_each(world, first=(1,))
tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
assert len(tasks) > 1
assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset([cores[world.rank]])}
assert cores[world.rank] in before
assert torch.get_num_threads() == 1
if len(before) >= world.size:
    assert len(set(cores)) == world.size
world.close()
"""


def test_every_thread_of_a_rank_keeps_to_its_core(tmp_path):
    (tmp_path / "script.py").write_text(TAKES_A_CORE)
    done = launch(2, tmp_path / "script.py")
    assert done.code == 0, done.err


def goals_of(result):
    return [(goal["goal"], goal["size_bytes"], goal["variant"]) for goal in result["goals"]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_json_is_one_object_with_a_fixed_schema(ranks):
    done = odc_mpi(0, *SMALL, "--json", "--ranks", ranks)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert list(result) == KEYS
    assert (result["benchmark"], result["ranks"], result["nodes"], result["repeats"]) == ("progress", ranks, 1, 1)
    assert (result["target"], result["other_node"]) == (1, False)
    assert len(result["cores"]) == ranks
    assert [size["size_bytes"] for size in result["get"]] == [64, 102400]
    assert [size["size_bytes"] for size in result["reduction"]] == [400, 102400]
    kinds = ["large_products", "small_operations", "python"]
    assert goals_of(result) == [
        *(("get_delay_s", size, kind) for size in (64, 102400) for kind in kinds),
        *(("slow_down", None, name) for name in ("accumulate", "mailbox")),
        *(("mailbox_of_put", size, "mailbox") for size in (400, 102400)),
    ]


def test_under_mpiexec_for_people_and_mpichs_own_thread_is_told():
    done = odc_mpi(2, *SMALL, MPIR_CVAR_ASYNC_PROGRESS=1)
    assert done.code == 0, done.err
    own = "MPICH's own thread" if "MPICH" in done.out.splitlines()[0] else "no thread"
    for words in ("2 ranks on 1 node", own, "A Get from a rank", "To a rank that computes", "Goals"):
        assert words in done.out, words
    assert "measuring Gets of 64, 100K from rank 1" in done.err


def test_one_rank_is_refused_in_a_line():
    done = odc_mpi(1, *SMALL)
    assert done.code == 2
    told = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert told == ["odc-mpi: error: bench progress: expected two ranks or more, of which one computes, got 1"]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("option", ["--sizes", "--push-sizes"])
def test_too_large_sizes_are_told(option):
    done = odc_mpi(0, "bench", "progress", option, "4096G", "--repeats", 1)
    assert done.code == 2
    (told,) = [line for line in done.err.splitlines() if line.startswith("odc-mpi: error:")]
    assert "MiB of memory are available" in told and "--push-sizes" in told
    assert "Traceback" not in done.err


def test_it_ends_at_its_deadline():
    done = odc_mpi(0, *SMALL[:-1], 100000, "--timeout-s", 5)
    assert done.code == 1
    assert "odc-mpi: error: 2 ranks did not end within 5 s: raise --timeout-s" in done.err
