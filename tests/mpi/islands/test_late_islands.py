"""Islands that merge without waiting for one that is stopped, and what this one does afterwards."""

import itertools
import os
import random
import subprocess
import time

import pytest
import torch
from test_diloco import linear_islands

from odc_mpi import DiLoCo
from odc_mpi.islands.quorum import Quorum
from odc_mpi.runtime.deadline import wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(3)]

STOPPED_S = 1.5


def stop_this_process(seconds=STOPPED_S, after_s=0.0):
    """Stop this process with SIGSTOP; another one continues it. Return this one."""
    command = f"sleep {after_s}; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    return subprocess.Popen(["sh", "-c", command])


@pytest.fixture
def decisions(world, tmp_path_factory):
    """An empty directory that all ranks know."""
    directory = tmp_path_factory.mktemp("decisions") if world.rank == 0 else None
    return world.gather_objects(directory)[0]


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize(("stopped", "fragments", "delay"), [(0, 1, 0), (1, 2, 1), (2, 3, 0)])
def test_the_others_go_on_without_a_stopped_island_which_then_catches_up(world, decisions, stopped, fragments, delay):
    """With 4 ranks, there are two islands of two, of which one rank is stopped. All end with the same parameters."""
    num_ranks = world.size // 3 + world.size % 3
    with linear_islands(world, num_ranks) as (islands, model, optimizer):
        stopped %= islands.size
        quorum = Quorum(islands.size - 1, 0.1, decisions)
        schedule = {"sync_every": 6, "fragments": fragments, "delay": delay}
        loop = DiLoCo(islands, model, **schedule, learning_rate=1.0, momentum=0.0, quorum=quorum)
        merges_by_time, results = [], []
        for step in range(1, 121):
            if step == 9 and islands.index == stopped and islands.island.rank == 0:
                stop_this_process().wait(60)
            with model.minibatch():
                if islands.island.rank == 0:
                    model(torch.eye(8)).sum().backward()
            optimizer.step()
            results.append(loop.step(1))
            if step == 120:
                results.append(loop.finish())
            model.publish()
            merges_by_time.append((time.time(), loop.num_merges))
            time.sleep(0.01)
        results = [each for each in results if each]
        totals = world.gather_objects((model.state_dict()["weight"].sum().item(), loop.num_merges))
        assert len(set(totals)) == 1, totals
        times = world.gather_objects(merges_by_time)
        late, other = (times[index * num_ranks] for index in (stopped, (stopped + 1) % islands.size))
        (began, before), (ended, _) = max(itertools.pairwise(late), key=lambda pair: pair[1][0] - pair[0][0])
        assert ended - began > STOPPED_S
        meanwhile = max(merges for when, merges in other if when < ended - 0.2)
        assert meanwhile - before > 3 * fragments, (before, meanwhile)
        if islands.index == stopped:
            assert max(each.lag for each in results) > 2
        else:
            assert sum(each.late_islands for each in results) > 3 * fragments
            assert sum(each.island_wait_s for each in results[: 3 * fragments]) < STOPPED_S
        loop.free()


def test_differences_of_late_islands_are_not_lost(world, decisions):
    """What an island learned while it was late enters its next merge, with a weight that falls with its lag."""
    with linear_islands(world, 1) as (islands, model, optimizer):
        settings = {"learning_rate": 1.0, "momentum": 0.0, "norm_limit": 0.0}
        loop = DiLoCo(islands, model, sync_every=1, **settings, quorum=Quorum(2, 0.1, decisions))
        is_late, ends, values, num_steps, lag = islands.index == 2, False, {}, 0, 0
        for step in itertools.count(1):
            if is_late and step == 5:
                assert wait_until((decisions / "continue").exists, patience_s=60)
            if islands.index == 0 and step == 20:
                (decisions / "continue").touch()
            with model.minibatch():
                (-(3 if is_late else 1) * model(torch.eye(8)).sum()).backward()
            optimizer.step()
            result, num_steps = loop.step(1), num_steps + 1
            values[loop.num_merges] = model.shard_parameters()[0][0].item()
            if result:
                lag, ends = result.lag, result.lag > 0 if is_late else step >= 20 and result.late_islands == 0
            if ends:
                last = loop.num_merges
                loop.finish()
            model.publish()
            if ends:
                break
            num_steps = num_steps if result is None else 0
        others, _, (_, merge, lag, num_steps) = world.gather_objects((values, last, lag, num_steps))
        weight = num_steps * (1 + lag) ** -0.5
        assert lag > 10 and merge == last and values[last] == others[0][merge]
        assert others[0][merge - 1] == pytest.approx(others[0][merge - 2] + 1), "without the late island"
        wanted = others[0][merge - 1] + (1 + 1 + weight * 3 * num_steps) / (1 + 1 + weight)
        assert others[0][merge] == pytest.approx(wanted)
        loop.free()


@pytest.mark.slow
@pytest.mark.sizes(3, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
def test_islands_that_stop_at_random_moments_agree(world, decisions, seed):
    """Each merge checks that its islands have the same outer parameters. With 4 ranks, two islands may merge apart."""
    draw = random.Random(1000 * seed + world.rank)
    with linear_islands(world, 1) as (islands, model, optimizer):
        schedule = {"sync_every": 3, "fragments": [1, 3, 3][seed], "delay": [1, 0, 0][seed]}
        wire = {"wire": "e3m0", "error_feedback": True} if seed == 1 else {}
        loop = DiLoCo(islands, model, **schedule, **wire, local_share=0.5, quorum=Quorum(2, 0.005, decisions))
        stops, late = [], 0
        for step in range(1, 301):
            if draw.random() < 0.06:
                stops.append(stop_this_process(draw.uniform(0.01, 0.2), draw.uniform(0, 0.03)))
            with model.minibatch():
                (model(torch.eye(8)).sum() * draw.random()).backward()
            optimizer.step()
            result = loop.step(draw.randint(0, 3))
            late += result.late_islands if result else 0
            if step == 300:
                loop.finish()
            model.publish()
        for each in stops:
            each.wait(60)
        values = world.gather_objects((model.state_dict()["weight"].sum().item(), loop.num_merges))
        assert len(set(values)) == 1, values
        assert max(world.gather_objects(late)) > 10
        loop.free()
