"""The baseline, all-gather and reduce-scatter as FSDP does: the results of a plain loop, and which collectives."""

import numpy as np
import pytest
import torch
from test_parity import assert_close, configure, expected
from torch import nn

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm import collective
from odc_mpi.comm.compose import collective_transport, window_transport
from odc_mpi.data.loader import Loader, read_batch
from odc_mpi.errors import UserError
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.optim import build_optimizer, schedule_factor
from odc_mpi.train.inputs import open_inputs

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

SIZES = [1, 7, 33, 1000, 65_537]


def backward(model, batch, num_tokens):
    loss = model(**batch.inputs).loss * (batch.num_tokens / num_tokens)
    loss.backward()
    return loss.item()


def run_minibatch(model, minibatch, padding):
    with model.minibatch("loss") as totals:
        num_left = max(minibatch.num_microbatches)
        for batch in minibatch:
            totals.values["loss"] += backward(model, batch, minibatch.num_tokens)
            num_left -= 1
        for _ in range(num_left):
            with model.padding():
                # A loss of NaN, from a division by no tokens, has to stay without effect.
                model(**padding.inputs).loss.mul(float("nan")).backward()
    assert totals.finite
    return totals.total("loss")


def run(config, world, balance="lb_mini", freeze=()):
    """Train as the trainer does, over collectives; return the data set, losses and parameters."""
    inputs = open_inputs(config, world.rank, world.size)
    for name, parameter in inputs.model.module.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    model = shard_model(
        inputs.model.module,
        world,
        param_dtype=getattr(torch, config.model.param_dtype),
        reduce_dtype=getattr(torch, config.model.reduce_dtype),
        activation_checkpointing=config.model.gradient_checkpointing,
        prefetch=config.comm.prefetch,
        weights=inputs.model.weights,
        decision=decide_for(world, transport="collective"),
    ).train()
    optim = config.optim
    optimizer = build_optimizer(
        "adamw",
        model.named_shard_parameters(),
        model.parameter_shapes(),
        lr=0.0,
        weight_decay=optim.weight_decay,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
    )
    data = config.data
    loader = Loader(
        inputs.dataset,
        minibatch_sequences=data.minibatch_sequences,
        max_tokens_per_microbatch=data.max_tokens_per_microbatch,
        balance=balance,
        seed=config.run.seed,
        rank=world.rank,
        size=world.size,
    )
    padding = read_batch(inputs.dataset, np.array([inputs.dataset.lengths.argmin()]))
    losses = []
    for step in range(config.run.steps):
        factor = schedule_factor(optim.lr_scheduler_type, step, optim.warmup_steps, config.run.steps)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate * factor
        losses.append(run_minibatch(model, next(loader), padding))
        model.clip_grad_norm_(optim.max_grad_norm)
        optimizer.step()
        model.publish()
    state = model.state_dict()
    model.close()
    return inputs.dataset, losses, state


def check(config, world, balance="lb_mini", freeze=()):
    dataset, losses, state = run(config, world, balance, freeze)
    wanted, parameters = expected(config, dataset, freeze)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_close(state, parameters)


@pytest.mark.parametrize("balance", ["local_sort", "lb_micro", "lb_mini"])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, balance, tied):
    check(configure(dataset_path, **{"model.config.tie_word_embeddings": str(tied).lower()}), world, balance)


@pytest.mark.parametrize(
    "freeze",
    [("embed_tokens",), ("layers.1.",), ("mlp", "layers.0.self_attn.q_proj"), ("layers",)],
    ids=["embedding", "a unit", "parts of units", "all units"],
)
def test_frozen_parameters_stay_and_the_others_learn(world, dataset_path, freeze):
    config = configure(dataset_path, **{"model.config.tie_word_embeddings": "false"})
    check(config, world, freeze=freeze)


@pytest.mark.parametrize(
    "changes",
    [{"model.gradient_checkpointing": "true"}, {"model.reduce_dtype": "float64"}, {"data.minibatch_sequences": 1}],
    ids=["checkpointing", "fp64", "fewer sequences than ranks"],
)
def test_settings_change_nothing(world, dataset_path, changes):
    check(configure(dataset_path, **changes), world)


def test_bf16_parameters_follow_the_fp32_run(world, dataset_path):
    config = configure(dataset_path, **{"model.param_dtype": "bfloat16"})
    dataset, losses, state = run(config, world)
    wanted, parameters = expected(config, dataset)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert losses == pytest.approx(wanted, rel=2e-2)
    for name, tensor in parameters.items():
        difference = (state[name].float() - tensor).norm() / tensor.norm().clamp_min(1e-3)
        assert difference < 0.2, name


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


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


def run_padded(model, world, num_microbatches, padding_scale=1.0):
    torch.manual_seed(world.rank)
    with model.minibatch() as totals:
        for i in range(3):
            if i < num_microbatches:
                model(torch.randn(2, 16)).square().mean().backward()
            else:
                with model.padding():
                    (model(torch.randn(1, 16)).mean() * padding_scale).backward()
    return totals


def test_two_gathers_and_a_reduction_for_each_unit_and_microbatch(recorded, world):
    """As FSDP2 does, in this order on every rank; the root, which it keeps for the backward, is gathered once."""
    model, log = recorded
    for step in range(2):
        run_padded(model, world, num_microbatches=(world.rank + step) % 4)
        model.clip_grad_norm_(1.0)
        model.publish()
    assert log == (FORWARD + BACKWARD) * 3 * 2
    assert model.num_collectives == (len(FORWARD + BACKWARD) * 3 + 3) * 2


def test_padding_adds_exactly_nothing(recorded, world):
    model, _ = recorded
    gradients = []
    for scale in (1.0, float("inf"), float("nan")):
        totals = run_padded(model, world, num_microbatches=1 - world.rank % 2, padding_scale=scale)
        assert totals.finite
        gradients.append([p.grad.clone() for p in model.shard_parameters()])
        model.publish()
    norms = world.gather_objects(sum(float(g.abs().sum()) for g in gradients[0]))
    assert sum(norms) > 0, "nobody had a real microbatch"
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


def test_a_real_gradient_that_is_not_finite_is_known_to_all(recorded, world):
    model, _ = recorded
    with model.minibatch() as totals:
        scale = float("nan") if world.rank == world.size - 1 else 1.0
        (model(torch.randn(2, 16)).mean() * scale).backward()
    assert not totals.finite
    model.publish()
    assert run_padded(model, world, 1).finite, "the gradients were not cleared"
    model.publish()


def test_the_same_gradients_as_over_windows(world):
    gradients = []
    for make in (window_transport, collective_transport):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 1)).double()
        model = ShardedModel(module, make(world, torch.float64, torch.float64), units=[Block])
        torch.manual_seed(world.rank)
        with model.minibatch():
            for i in range(3):
                with model.padding() if i > world.rank else torch.enable_grad():
                    model(torch.randn(2, 16).double()).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.shard_parameters()])
        model.publish()
        model.close()
    for window, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, window, rtol=1e-12, atol=1e-14)


@pytest.fixture
def make(world, allocate):
    def build(param_dtype=torch.float32, reduce_dtype=torch.float32, trainable=True):
        transport = collective_transport(world, param_dtype, reduce_dtype)
        return allocate(transport, SIZES, trainable)

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_rank_gathers_what_the_owners_wrote(make, dtype):
    transport = make(param_dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for index, layout in enumerate(transport.parameters.layouts):
        wanted = torch.randn(layout.numel, generator=generator).to(dtype)
        start, stop = layout.owned(transport.group.rank)
        transport.parameters.shard(index)[: stop - start] = wanted[start:stop]
        fetched = transport.parameters.fetch(index).wait()
        assert torch.equal(fetched, wanted)
        transport.parameters.release(fetched)


@pytest.mark.parametrize("num_comms", [2, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pushes_of_all_ranks_add_up_exactly(make, world, dtype, num_comms, monkeypatch):
    """Integers, so that the sum is exact; each rank pushes a stretch of its own, and does not wait."""
    monkeypatch.setattr(collective, "MAX_COMMUNICATORS", num_comms)
    transport = make(reduce_dtype=dtype)
    wanted = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
    for number in range(5):
        for index, numel in enumerate(SIZES):
            for rank in range(world.size):
                rng = np.random.default_rng([rank, number, index])
                start, stop = sorted(rng.integers(0, numel + 1, size=2).tolist())
                values = torch.from_numpy(rng.integers(-1000, 1000, size=stop - start)).to(dtype)
                wanted[index][start:stop] += values
                if rank == world.rank:
                    transport.gradients.push(index, values, start)
    transport.complete_gradients(np.zeros(1))
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(world.rank)
        own = transport.gradients.shard(index)
        assert torch.equal(own[: stop - start].double(), wanted[index][start:stop])
        assert not own[stop - start :].any(), "padding was written to"


def test_reports_and_sums_reach_everyone(make, world):
    transport = make()
    reports = transport.complete_gradients(np.array([world.rank, 0.5]))
    assert reports.tolist() == [[rank, 0.5] for rank in range(world.size)]
    assert transport.group.norm(np.array([1.0, world.rank])).tolist() == [world.size, sum(range(world.size))]
    tensor = torch.full((3, 5), float(world.rank))
    transport.group.broadcast(tensor)
    assert not tensor.any()


def test_frozen_arrays_have_no_gradient_shard(make):
    transport = make(trainable=False)
    with pytest.raises(KeyError):
        transport.gradients.shard(0)


def test_an_unknown_transport_is_refused(world):
    with pytest.raises(UserError, match="expected window or collective, got gloo"):
        decide_for(world, transport="gloo")
