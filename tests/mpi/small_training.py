"""Small trainings over windows, and the plain loop that they have to agree with."""

import contextlib
import itertools
import json
from pathlib import Path

import pytest
import tiny_qwen2
import torch
import torch_reference
import transformers

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights
from odc_mpi.data.loader import Loader
from odc_mpi.training import settings as configuration
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.train import train

STEPS = 5
QWEN2 = tiny_qwen2.QWEN2 | {"num_hidden_layers": 3}


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
        "run.device": "cpu",
        "model.param_dtype": "float32",
        "model.gradient_checkpointing": False,
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
    reference = torch_reference.initial_model(config)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    losses = torch_reference.train(reference, dataset, first_minibatches(config, dataset), config.optim)
    return losses, reference.state_dict()


def first_minibatches(config, dataset):
    """The indices of the sequences of each step."""
    draw = Loader(
        dataset,
        minibatch_sequences=config.data.minibatch_sequences,
        max_tokens_per_microbatch=config.data.max_tokens_per_microbatch,
        seed=config.run.seed,
    )
    return [minibatch.indices for minibatch in itertools.islice(draw, config.run.steps)]


def run(config, world, freeze=()):
    inputs = open_inputs(config, world.rank, world.size)
    for name, parameter in inputs.model.module.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    with training(config, world, inputs) as (trainer, steps):
        return inputs.dataset, steps(), trainer.model.state_dict()


@contextlib.contextmanager
def training(config, world, inputs):
    """A trainer, and what takes its steps and returns their metrics."""
    trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world)))
    yield trainer, lambda: [trainer.step() for _ in range(config.run.steps)]
    world.gather_objects(None)  # state_dict is one-sided: no rank frees windows that another still reads
    trainer.model.close()
    if windows := getattr(trainer._source, "_windows", None):
        windows.close()


def save_model(world, path, seed=3, max_shard_size="50GB", **changes):
    """Have rank 0 write a model with new weights; return its directory, which all ranks can read."""
    if world.rank == 0:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(**QWEN2 | changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path, max_shard_size=max_shard_size)
    world.gather_objects(None)
    return path


def train_to_the_end(config, world, job=None, stop=None):
    """Train on the ranks of `world`; return the lines of metrics and the summary, when all ranks of the job have."""
    summary = train(config, world, stop)
    (job or world).gather_objects(None)
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], summary


def assert_saved(run_dir, module):
    """The newest checkpoint of a run has the parameters of a plain model."""
    named = dict(module.named_parameters())
    with open_newest_checkpoint(run_dir) as checkpoint:
        read = CheckpointWeights(checkpoint).read
        assert_close({name: read(name, 0, tensor.numel()).view(tensor.shape) for name, tensor in named.items()}, named)


def on_first_rank(world, compare):
    """Compare on rank 0; a failure fails the test on all ranks."""
    problem = None
    if world.rank == 0:
        try:
            compare()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problem = world.gather_objects(problem)[0]
    assert not problem, problem


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
