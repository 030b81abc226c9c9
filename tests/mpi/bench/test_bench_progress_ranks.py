"""What `odc-mpi bench progress` is made of: a rank that computes until it is told to stop, and what is compared."""

import numpy as np
import pytest
import torch

from odc_mpi.bench.progress import gets, politeness, pushes
from odc_mpi.bench.progress.computing import Spells, find_target, kinds_of_work
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.windows.rma import Window

pytestmark = [pytest.mark.mpi(min_size=2)]

SIZES = [400, 1 << 20]


@pytest.fixture
def target(world):
    return find_target(world)


def meet(world):
    world.meet(world.comm.Ibarrier(), "meeting in a test")


def test_the_target_computes_until_rank_0_has_measured(world, target):
    progress = ProgressThread(world, serve=lambda: False)
    spells = Spells(world, target, settle_s=0.02)
    calls = {"work": 0, "measure": 0}

    def work():
        calls["work"] += 1
        assert calls["work"] < 10_000_000, "nobody tells it to stop"

    def measure():
        calls["measure"] += 1
        return 7.0 + calls["measure"]

    samples = [spells.sample(one, measure) for one in (work, None, work)]
    assert [sample.seconds for sample in samples] == [8.0, 9.0, 10.0], "every rank has what rank 0 measured"
    assert [sample.computed_s > 0 for sample in samples] == [True, False, True]
    assert calls["measure"] == (3 if world.rank == 0 else 0)
    assert (calls["work"] > 1) == (world.rank == target)
    assert all(sample.computed_s > 0.01 for sample in samples[::2]), "it goes on while rank 0 waits and measures"
    assert len(set(world.gather_objects(samples[0]))) == 1
    progress.close()
    spells.free()


def test_gets_of_every_size_from_every_kind_of_work(world, target):
    result = gets.measure(world, target, SIZES, 1)
    assert [size["size_bytes"] for size in result] == SIZES
    for size in result:
        assert set(size["kinds"]) == {"idle", *kinds_of_work()}
        for name, entry in size["kinds"].items():
            assert 0 < entry["median_s"] <= entry["longest_s"]
            assert (entry["computed_s"] > 0) == (name != "idle")
    assert len(set(map(str, world.gather_objects(result)))) == 1


def test_a_get_that_brings_something_else_is_noticed(world, target):
    window = Window(world, 1000, torch.uint8)
    window.tensor.numpy()[:] = gets.pattern(1000, world.rank)
    if world.rank == target:
        window.tensor[999] += 1
    window.sync()
    meet(world)
    memory = np.empty(1000, dtype=np.uint8)
    if world.rank == 0:
        assert gets.read(world, window, target, memory[:999]) > 0
        with pytest.raises(RuntimeError, match=f"a Get of 1000 bytes from rank {target} brought something else"):
            gets.read(world, window, target, memory)
    meet(world)
    with world.meeting("freeing a window"):
        window.free()


def test_politeness_compares_the_same_steps(world):
    result = politeness.measure(world, rounds=2, sample_s=0.01)
    assert list(result["seconds"]) == ["without", "accumulate", "mailbox"]
    assert list(result["slow_down"]) == ["accumulate", "mailbox"]
    assert result["steps"] >= 1
    assert all(0 < one["low"] <= one["median"] <= one["high"] for one in result["seconds"].values())


def test_pushes_of_every_size_by_every_way(world, target):
    result = pushes.measure(world, target, [1 << 20, 400], 2, budget_s=60)
    assert [size["size_bytes"] for size in result] == [400, 1 << 20], "the smallest first"
    for size in result:
        assert list(size["variants"]) == ["put", "accumulate", "mailbox"]
        assert size["left_out"] == {}
        assert all(entry["num_samples"] == 2 and entry["of_put"] > 0 for entry in size["variants"].values())
    assert len(set(map(str, world.gather_objects(result)))) == 1


def test_all_ranks_cut_the_same_short(world, target):
    result = pushes.measure(world, target, [400, 800, 1 << 20], 3, budget_s=1e-9)
    assert [size["variants"][name]["num_samples"] for size in result[:1] for name in size["variants"]] == [1, 1, 1]
    for size in result[1:]:
        assert size["variants"] == {}
        assert list(size["left_out"]) == ["put", "accumulate", "mailbox"]
        assert all("of 400 took" in reason for reason in size["left_out"].values())


def check(made, world, target, index, num_pushes):
    """Check sums; return what the target has to say against them."""
    problem = None
    try:
        made.check(index, num_pushes)
    except RuntimeError as error:
        assert world.rank == target
        problem = str(error)
        meet(world)  # the others are there
    return world.gather_objects(problem)[target]


@pytest.mark.parametrize("wrong", ["put", "accumulate", "mailbox"])
def test_wrong_sums_are_noticed(world, target, wrong):
    made = pushes.Pushes(world, target, SIZES)
    for index in range(len(SIZES)):
        made.clear()
        if world.rank == 0:
            for way in made.ways.values():
                for _ in range(3):
                    assert way(index) > 0
        counts = dict.fromkeys(made.ways, 3)
        assert check(made, world, target, index, counts) is None
        if wrong != "put":  # which overwrites
            assert check(made, world, target, index, counts | {wrong: 2}).startswith(f"{wrong}: 2 pushes of")
        arrived = made._window.tensor if wrong == "put" else made._reductions[wrong].shard(index)
        arrived[SIZES[index] // 4 - 1] += 1
        meet(world)
        assert check(made, world, target, index, counts).startswith(f"{wrong}: 3 pushes of {SIZES[index]} bytes")
    made.free()
