"""The baseline, all-gather and reduce-scatter as FSDP does: the results of a plain loop, and which collectives."""

import numpy as np
import pytest
import torch
from small_training import FROZEN, STEPS, assert_close, configure, expected
from torch import nn
from units import Block, assert_pushed, random_pushes

from odc_mpi.api import decide_for
from odc_mpi.bench.baselines import CollectiveBaseline
from odc_mpi.comm import collective
from odc_mpi.comm.factory import collective_transport
from odc_mpi.errors import UserError
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.inputs import open_inputs

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

SIZES = [1, 7, 33, 1000, 65_537]


@pytest.mark.parametrize(
    ("freeze", "changes"),
    [
        ((), {"data.balance": "lb_micro"}),
        ((), {"data.balance": "local_sort", "model.config.tie_word_embeddings": "false"}),
        (FROZEN[2], {"model.config.tie_word_embeddings": "false"}),
        ((), {"data.minibatch_sequences": 1}),
    ],
    ids=["lb_micro", "local_sort", "frozen", "fewer sequences than ranks"],
)
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, freeze, changes):
    """Seven sequences, so that ranks have different numbers of microbatches and pad; or parts of units frozen."""
    constant = {"optim.lr_scheduler_type": "constant", "optim.warmup_steps": 0, "optim.learning_rate": 5e-3}
    config = configure(dataset_path, **constant | changes)
    inputs = open_inputs(config, world.rank, world.size)
    for name, parameter in inputs.model.module.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    losses, wanted = expected(config, inputs.dataset, freeze)
    baseline = CollectiveBaseline(world, config, inputs)
    parts = world.gather_objects([baseline.step()[0] for _ in range(STEPS)])
    assert [sum(step) for step in zip(*parts, strict=True)] == pytest.approx(losses, rel=1e-5)
    assert_close(baseline.model.state_dict(), wanted)
    baseline.close()


def recording(transport):
    """Have what is called written down, in order."""
    log, parameters, gradients = [], transport.parameters, transport.gradients
    start_fetch, push = parameters.start_fetch, gradients.push

    def recorded_fetch(index, buffer):
        log.append(f"gather {parameters.layouts[index].name}")
        return start_fetch(index, buffer)

    def recorded_push(index, gradient, start=0):
        log.append(f"reduce {parameters.layouts[index].name}")
        return push(index, gradient, start)

    parameters.start_fetch, gradients.push = recorded_fetch, recorded_push
    return log


@pytest.fixture
def recorded(world):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 16), Block(), Block(), Block(), nn.Linear(16, 1))
    transport = collective_transport(world)
    log = recording(transport)
    model = ShardedModel(module, transport, units=[Block], prefetch=2)
    log.clear()
    transport.group.num_collectives = 0
    yield model, log
    model.close()


FORWARD = ["gather (root)", "gather 1", "gather 2", "gather 3"]
BACKWARD = ["gather 3", "reduce 3", "gather 2", "reduce 2", "gather 1", "reduce 1", "reduce (root)"]


def run_three(model, world, num_microbatches=3):
    """Run three microbatches, of which those beyond `num_microbatches` have a loss of zero."""
    torch.manual_seed(world.rank)
    with model.minibatch() as totals:
        for i in range(3):
            (model(torch.randn(2, 16)).square().mean() * (i < num_microbatches)).backward()
    return totals


def test_two_gathers_and_a_reduction_for_each_unit_and_microbatch(recorded, world):
    """As FSDP2 does, in this order on every rank; the root, which it keeps for the backward, is gathered once."""
    model, log = recorded
    for step in range(2):
        run_three(model, world, num_microbatches=(world.rank + step) % 4)
        model.clip_grad_norm_(1.0)
        model.publish()
    assert log == (FORWARD + BACKWARD) * 3 * 2
    assert model.usage.num_collectives == (len(FORWARD + BACKWARD) * 3 + 3) * 2


def test_a_real_gradient_that_is_not_finite_is_known_to_all(recorded, world):
    model, _ = recorded
    with model.minibatch() as totals:
        scale = float("nan") if world.rank == world.size - 1 else 1.0
        (model(torch.randn(2, 16)).mean() * scale).backward()
    assert not totals.finite
    model.publish()
    assert run_three(model, world).finite, "the gradients were not cleared"
    model.publish()


def test_pushes_of_all_ranks_add_up_exactly(allocate, world, monkeypatch):
    """Integers, so that the sum is exact; each rank pushes a stretch of its own, and does not wait."""
    monkeypatch.setattr(collective, "MAX_COMMUNICATORS", 2)
    transport = allocate(collective_transport(world, torch.float32, torch.float64), SIZES)
    for number in range(5):
        for index, start, values in random_pushes(SIZES, world.rank, number):
            transport.gradients.push(index, values.double(), start)
    transport.complete_gradients(np.zeros(1))
    assert_pushed(world, transport, SIZES, range(5))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transport": "gloo"}, "expected window or collective, got gloo"),
        ({"transport": "collective", "reduction": "mailbox"}, "collective .* uses no other setting"),
        ({"transport": "collective", "device": "cuda"}, "collective computes on the host"),
    ],
)
def test_missing_abilities_of_a_transport_are_refused(world, given, words):
    with pytest.raises(UserError, match=words):
        decide_for(world, **given)
