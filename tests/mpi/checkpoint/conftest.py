"""Trainings of a test's own."""

import pytest
from small_training import configure
from whole_runs import SETTINGS, losses

from odc_mpi.training.train import train


@pytest.fixture
def run(world, base, dataset_path):
    """`run(name, **settings)` trains in a directory of that name, and returns the losses of metrics.jsonl."""

    def start(name, **settings):
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        config = configure(dataset_path, **(SETTINGS | {"run.dir": base / name} | changes))
        train(config, world)
        world.gather_objects(None)
        return losses(base / name)

    start.base = base
    return start
