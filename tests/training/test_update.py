"""Updates without gradients, and the end of a run that makes no progress."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from odc_mpi.errors import TrainingError
from odc_mpi.observe.callback import Step
from odc_mpi.training.nonfinite import NonFiniteStepLimit
from odc_mpi.training.settings import OptimConfig, RunConfig
from odc_mpi.training.update import Update


def feed_limit(limit, *skipped):
    for number, one in enumerate(skipped, 7):
        limit.on_step_end(Step(number, None, {"skipped": one}))


def test_only_steps_in_a_row_count():
    limit = NonFiniteStepLimit(3)
    feed_limit(limit, True, True, False, True, True)
    assert limit.state_dict() == {"skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match=r"^step 7: .* in 3 steps in a row, which is run\.max_skipped_steps"):
        feed_limit(limit, True)


def test_the_count_goes_on_with_the_run():
    metadata = {"loader": {}, **NonFiniteStepLimit(3).state_dict(), "skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match="in 3 steps in a row"):
        feed_limit(NonFiniteStepLimit(3, metadata), True)
    feed_limit(NonFiniteStepLimit(3, metadata), False, True, True)


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


def test_a_minibatch_without_any_gradient_leaves_the_parameters():
    parameter = torch.nn.Parameter(torch.ones(3))
    divisors = []
    spans = SimpleNamespace(span=lambda kind: nullcontext())
    model = SimpleNamespace(divide_gradients_=divisors.append, spans=spans)
    config = SimpleNamespace(optim=SimpleNamespace(max_grad_norm=0.0))
    update = Update(model, torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1), config)
    step = Step(1, SimpleNamespace(island_share=0.5), {})
    update.run(step, 3.0, finite=True)
    assert (divisors, step.metrics) == ([3.0, 0.5], {"grad_norm": None, "skipped": False})
    assert torch.equal(parameter, torch.ones(3))
