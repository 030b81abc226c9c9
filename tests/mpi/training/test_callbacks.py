"""The order of callbacks, and names of what they gather."""

import re

import pytest
from small_training import configure, training

from odc_mpi.observe.callback import Callback
from odc_mpi.training import run
from odc_mpi.training.inputs import open_inputs

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1)]


def test_callbacks_run_in_the_documented_order(world, dataset_path, shared_dir, monkeypatch):
    table = run.__doc__.partition("in this order:\n\n")[2]
    documented = [name for line in table.splitlines() for name in re.findall(r"[A-Z]\w+", line.strip().split("  ")[0])]
    found = []

    def look(trainer, *rest):
        for each in trainer.callbacks:
            found.append(next(kind.__name__ for kind in type(each).mro() if kind.__name__ in documented))
        run_steps(trainer, *rest)

    run_steps = run._run_steps
    monkeypatch.setattr(run, "_run_steps", look)
    changes = {"run.exact": "true", "data.cost": "fitted", "data.eval_path": dataset_path, "run.steps": 1}
    run.train(configure(dataset_path, **changes, **{"run.dir": shared_dir / "ordered"}), world)
    assert found == documented


def test_two_callbacks_with_the_same_name_are_refused(world, dataset_path):
    """Of two numbers of one name only the last would be heard."""
    config = configure(dataset_path)
    inputs = open_inputs(config, world.rank, world.size)
    with training(config, world, inputs) as (trainer, _):
        for _ in range(2):
            trainer.callbacks.append(Named())
        with pytest.raises(ValueError, match="got 'heard' of Named and Named"):
            trainer.start()
        trainer.callbacks.pop()
        trainer.start()


class Named(Callback):
    gathered_names = ("heard",)

    def local_values(self):
        return (1.0,)
