"""Generation and training on demand on the real runtime: every share once, and none before its group is finished."""

import time

import numpy as np
import pytest

from odc_mpi.bench.rollouts import FinishedBoard, WindowOnDemand, measure
from odc_mpi.simulate.rollouts import SCHEDULES, SHARES, Rollouts
from odc_mpi.simulate.scenario import Scenario

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def test_the_board_has_each_entry_once_in_thousands_of_minibatches(world):
    board = FinishedBoard(world, 4 * world.size)
    idle = np.random.default_rng(world.rank)
    for minibatch in range(500):
        for entry in range(2):
            if minibatch % 50 == 0:
                time.sleep(idle.random() * 1e-3)
            first = 4 * world.rank + 2 * entry
            board.post(range(first, first + 2))
        # Everybody reads all of it, in the same order, what others have not posted yet too.
        read = [board.wait(position) for position in range(4 * world.size)]
        assert sorted(read) == list(range(4 * world.size))
        if minibatch % 100 == 0:
            assert len(set(map(tuple, world.gather_objects(read)))) == 1
        world.meet(world.comm.Ibarrier(), "all have read")
        board.reset()
        world.meet(world.comm.Ibarrier(), "the board is empty")
    board.close()


class Recording(WindowOnDemand):
    """Notes when groups are finished, and when which completions are trained."""

    def __init__(self, world, num_units, num_groups):
        super().__init__(world, num_units, num_groups)
        self.finishes, self.trained = {}, []

    def finished(self, group):
        self.finishes[group] = time.monotonic()
        super().finished(group)

    def microbatches(self, plan):
        for own in super().microbatches(plan):
            self.trained.append((own, time.monotonic()))
            yield own


def test_every_share_is_trained_once_after_its_group_is_finished(world):
    speeds = 0.3  # so different that some ranks train what others have generated
    scenario = Scenario(ranks=world.size, per_rank=2, lengths="aime", num_minibatches=4, speed_variation=speeds)
    rollouts = Rollouts(scenario, completions=4)
    runner = Recording(world, 1, rollouts.num_groups)
    for trial in rollouts.trials():
        runner.rollout_trial = trial
        runner.finishes, runner.trained = {}, []
        runner.run(trial.trial, trial.plan("window/on_demand"), 0.1 / trial.bounds_s()[1])
        everyone = world.gather_objects((runner.finishes, runner.trained))
        finishes = {group: at for own, _ in everyone for group, at in own.items()}
        assert sorted(finishes) == list(range(rollouts.num_groups))
        assert sum(len(own) for own, _ in everyone) == rollouts.num_groups, "a prompt is generated once"
        trained = [(i, at) for _, own in everyone for positions, at in own for i in positions]
        assert sorted(i for i, _ in trained) == list(range(len(trial.trial.lengths)))
        assert all(at >= finishes[i // 4] for i, at in trained)
    runner.close()
    assert SHARES > 1


def test_figures_of_a_measurement(world):
    scenario = Scenario(ranks=world.size, per_rank=1, lengths="aime", num_minibatches=2, num_units=1)
    found = measure(world, Rollouts(scenario, completions=2), 0.05)
    assert set(found["speedup"]) == {*SCHEDULES, "bound"} and found["workload"] == "grpo"
    assert found["benchmark"] == "schedule" and found["speedup"]["collective/barrier"] == 1.0
    assert (found["simulated"] is None) == (world.rank > 0)
    assert all(len(found["timeline"][name]) == world.size for name in SCHEDULES)
