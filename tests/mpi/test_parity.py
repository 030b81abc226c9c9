"""Training over windows gives the losses and parameters of a plain loop on one process."""

import contextlib
import functools
import itertools

import plain
import pytest
import torch

from odc_mpi import api
from odc_mpi.comm.compose import window_transport
from odc_mpi.comm.reduce.mailbox import MailboxReduction
from odc_mpi.data.loader import Loader
from odc_mpi.models import build as models
from odc_mpi.train import settings as configuration
from odc_mpi.train.inputs import open_inputs
from odc_mpi.train.run import build_trainer, decide

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]
#: Of what may depend on how many ranks there are.
EVERY_SIZE = pytest.mark.sizes(1, 2, 3, 4)

STEPS = 5
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def configure(dataset_path, **changes):
    settings = {
        "data.path": dataset_path,
        "data.minibatch_sequences": 7,
        "data.max_tokens_per_microbatch": 64,
        "optim.learning_rate": 1e-2,
        "optim.weight_decay": 0.1,
        "optim.warmup_steps": 2,
        "optim.max_grad_norm": 0.5,
        # AdamW divides by the gradient's own size: where that is rounding noise (a key's bias has no effect at all), it
        # would blow the noise up to a full step. A larger epsilon keeps the comparison about gradients.
        "optim.adam_epsilon": 1e-3,
        "run.steps": STEPS,
        "run.threads": 1,
    }
    if "model.path" not in changes:
        settings |= {f"model.config.{key}": value for key, value in QWEN2.items()}
    settings |= changes
    return configuration.load(None, [f"--{key}={value}" for key, value in settings.items() if value is not None])


#: Parts of names of parameters that are frozen, and what they are.
FROZEN = [("embed_tokens",), ("layers.1.",), ("mlp", "layers.0.self_attn.q_proj"), ("layers",)]
FROZEN_IDS = ["embedding", "a unit", "parts of units", "all units"]

#: Results of plain loops, by all that they depend on: many tests differ in what must not change them.
_expected = {}


def expected(config, dataset, freeze=()):
    """The plain loop's losses and parameters, not to be written to; also what is frozen stays."""
    data = config.data
    seen = (config.model.config, config.optim, config.run, freeze, data.path, data.minibatch_sequences)
    key = repr((*seen, data.max_tokens_per_microbatch))
    if key not in _expected:
        _expected[key] = plain_loop(config, dataset, freeze)
    return _expected[key]


def plain_loop(config, dataset, freeze):
    reference = plain.model(models.from_config(config.model.config, config.run.seed), config.model.config)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    draw = Loader(
        dataset,
        minibatch_sequences=config.data.minibatch_sequences,
        max_tokens_per_microbatch=config.data.max_tokens_per_microbatch,
        seed=config.run.seed,
    )
    minibatches = [minibatch.indices for minibatch in itertools.islice(draw, config.run.steps)]
    losses = plain.train(reference, dataset, minibatches, config.optim)
    return losses, reference.state_dict()


def run(config, world, freeze=()):
    inputs = open_inputs(config, world.rank, world.size)
    for name, parameter in inputs.model.module.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    with training(config, world, inputs) as (trainer, steps):
        return inputs.dataset, steps(), trainer.model.state_dict()


@contextlib.contextmanager
def training(config, world, inputs):
    """A trainer, and what takes its steps and returns their metrics."""
    trainer = build_trainer(config, world, inputs, decide(config, world))
    yield trainer, lambda: [trainer.step() for _ in range(config.run.steps)]
    world.gather_objects(None)  # state_dict is one-sided: nobody frees windows that another still reads
    trainer.model.close()


def assert_like_plain(config, world, freeze=(), like=None):
    """Train; losses and parameters are those of the plain loop, of another configuration if `like` is given."""
    dataset, metrics, state = run(config, world, freeze)
    losses, wanted = expected(like or config, dataset, freeze)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert_close(state, wanted)
    return metrics, state


def assert_bf16_follows(config, world):
    dataset, metrics, state = run(config, world)
    losses, parameters = expected(config, dataset)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=2e-2)
    for name, wanted in parameters.items():
        difference = (state[name].float() - wanted).norm() / wanted.norm().clamp_min(1e-3)
        assert difference < 0.2, name


def assert_close(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@EVERY_SIZE
@pytest.mark.parametrize(
    ("balance", "tied", "prefetch"),
    [
        ("local_sort", True, 0),
        ("local_sort", False, 2),
        ("lb_micro", False, 0),
        ("lb_mini", True, 1),
        ("lb_mini", False, 2),
        ("dynamic", True, 0),
        ("dynamic", False, 1),
    ],
)
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, balance, tied, prefetch):
    changes = {
        "data.balance": balance,
        "model.config.tie_word_embeddings": str(tied).lower(),
        "comm.prefetch": prefetch,
    }
    config = configure(dataset_path, **changes)
    _, state = assert_like_plain(config, world)
    start = models.from_config(config.model.config, config.run.seed).weights
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
        first = start.read(name, 0, state[name].numel()).view(state[name].shape)
        moved = (state[name] - first).norm() / first.norm()
        assert moved > 1e-2, f"{name} hardly moved ({moved:.1e}): whatever stood still would agree"


@pytest.mark.parametrize("freeze", FROZEN, ids=FROZEN_IDS)
def test_frozen_parameters_stay_and_the_others_learn(world, dataset_path, freeze):
    config = configure(dataset_path, **{"data.balance": "lb_mini", "model.config.tie_word_embeddings": "false"})
    assert_like_plain(config, world, freeze)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_activation_checkpointing_changes_nothing(world, dataset_path, prefetch):
    config = configure(dataset_path, **{"model.gradient_checkpointing": "true", "comm.prefetch": prefetch})
    assert_like_plain(config, world)


@pytest.mark.parametrize("balance", ["lb_mini", "dynamic"])
def test_a_cost_that_is_learned_changes_plans_and_nothing_else(world, dataset_path, balance):
    config = configure(dataset_path, **{"data.balance": balance, "data.cost": "fitted", "run.steps": 8})
    dataset, metrics, _ = run(config, world)
    losses, _ = expected(config, dataset)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)


def test_through_mailboxes(world, dataset_path, monkeypatch):
    """With room for about a tenth of a unit's gradient, and a different number of microbatches on each rank."""
    reduction = functools.partial(MailboxReduction, mailbox_bytes=1024 * world.size)
    monkeypatch.setattr(api, "window_transport", functools.partial(window_transport, reduction=reduction))
    config = configure(dataset_path, **{"data.balance": "lb_mini"})
    assert_like_plain(config, world)


def test_sums_in_fp64(world, dataset_path):
    config = configure(dataset_path, **{"model.reduce_dtype": "float64"})
    assert_like_plain(config, world)


def test_bf16_parameters_follow_the_fp32_run(world, dataset_path):
    """Parameters travel and compute in bf16, 8 bits of mantissa; the masters keep what small updates add up to."""
    assert_bf16_follows(configure(dataset_path, **{"model.param_dtype": "bfloat16"}), world)


@EVERY_SIZE
def test_fewer_sequences_than_ranks(world, dataset_path):
    """Some ranks have no microbatch at all; nothing is lost and nobody hangs."""
    config = configure(dataset_path, **{"data.minibatch_sequences": 1})
    metrics, _ = assert_like_plain(config, world)
    fewest = 1 if world.size == 1 else 0
    assert all((m["microbatches_min"], m["microbatches_max"]) == (fewest, 1) for m in metrics)


@EVERY_SIZE
def test_initial_weights_do_not_depend_on_the_number_of_ranks(world, dataset_path):
    config = configure(dataset_path)
    built = models.from_config(config.model.config, config.run.seed)
    inputs = open_inputs(config, world.rank, world.size)
    with training(config, world, inputs) as (trainer, _):
        state = trainer.model.state_dict()
        for name, shape in trainer.model.parameter_shapes().items():
            drawn = built.weights.read(name, 0, state[name].numel()).view(shape)
            assert torch.equal(state[name], drawn), name
