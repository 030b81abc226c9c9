"""Learning rates, updates without gradients, and names of callbacks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from user_errors import refused

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.training.loop import Trainer
from odc_mpi.training.settings import OptimConfig, RunConfig
from odc_mpi.training.update import Update, make_optimizer


@pytest.mark.parametrize(("warmup", "equal_steps"), [({"warmup_ratio": 0.25}, 2), ({"warmup_ratio": 0.2}, 2)])
def test_a_ratio_of_the_steps_is_warmup_rounded_up(warmup, equal_steps):
    def rates(**optim):
        parameter = torch.nn.Parameter(torch.ones(1))
        config = SimpleNamespace(optim=OptimConfig(learning_rate=1.0, **optim), run=RunConfig(steps=8))
        update = Update(None, torch.optim.SGD([parameter]), config)
        steps = [Step(number, None, {}) for number in range(1, 9)]
        for step in steps:
            update.on_step_begin(step)
        return [step.metrics["learning_rate"] for step in steps]

    assert rates(**warmup) == rates(warmup_steps=equal_steps) != rates(warmup_steps=equal_steps - 1)


@pytest.mark.parametrize(("kind", "fused"), [("adamw", True), ("sgd", None)])
def test_weight_decay_depends_on_the_full_shape(kind, fused):
    shapes = {"matrix": (3, 4), "bias": (4,), "scalar": (), "kernel": (2, 2, 3, 3)}
    named = {name: torch.nn.Parameter(torch.ones(5)) for name in shapes}  # slices, all of one dimension
    names = {id(p): name for name, p in named.items()}
    config = OptimConfig(kind, 0.1, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, momentum=0.5)
    expected = {"lr": 0.1, "fused": fused}
    expected |= {"betas": (0.8, 0.9), "eps": 1e-6} if kind == "adamw" else {"momentum": 0.5}
    groups = make_optimizer(config, named.items(), shapes).param_groups
    assert [([names[id(p)] for p in group["params"]], group["weight_decay"]) for group in groups] == [
        (["matrix", "kernel"], 0.3),
        (["bias", "scalar"], 0.0),
    ]
    assert all(expected.items() <= group.items() for group in groups)
    assert len(make_optimizer(config, [("matrix", named["matrix"])], shapes).param_groups) == 1


def test_a_minibatch_without_any_gradient_leaves_the_parameters():
    parameter = torch.nn.Parameter(torch.ones(3))
    divisors = []
    spans = SimpleNamespace(span=lambda kind: nullcontext())
    model = SimpleNamespace(divide_gradients_=divisors.append, spans=spans)
    config = SimpleNamespace(optim=SimpleNamespace(max_grad_norm=0.0))
    update = Update(model, torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1), config)
    step = Step(1, None, {})
    update.run(step, 3.0, finite=True)
    assert (divisors, step.metrics) == ([3.0], {"grad_norm": None, "skipped": False})
    assert torch.equal(parameter, torch.ones(3))


def test_two_callbacks_with_the_same_name_are_refused():
    """Of two numbers of one name only the last would be reported."""
    callback = Callback()
    callback.gathered_names = ("gathered",)
    model = SimpleNamespace(device=torch.device("cpu"))
    trainer = Trainer(model, Callback(), callback, Callback(), Callback(), [callback])
    refused("got gathered twice", trainer.start, error=ValueError)
