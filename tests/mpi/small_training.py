"""Small trainings over windows, and the plain loop that they have to agree with."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import tiny_qwen2
import torch
import torch_reference
import transformers

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.data.loader import Loader, Part
from odc_mpi.observe.usage import UsageMetrics
from odc_mpi.training import settings as configuration
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.islands.apart import add_diloco
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.train import train

STEPS = 3
QWEN2 = tiny_qwen2.QWEN2 | {"num_hidden_layers": 3}


def configure(dataset_path, **changes):
    """The settings of a small run with changes, `run__steps` for `run.steps`. None leaves out a setting."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {
        "data.path": dataset_path,
        "data.minibatch_sequences": 7,
        "data.max_tokens_per_microbatch": 64,
        "optim.learning_rate": 1e-2,
        "optim.weight_decay": 0.1,
        "optim.warmup_steps": 1,
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


#: Results of plain loops, by all that they depend on: many tests differ in what must not change them.
_expected = {}


def dependencies(config):
    """What the results of a training in plain torch depend on."""
    data, run, lora = config.data, config.run, {name: str(value) for name, value in vars(config.lora).items()}
    optim = replace(config.optim, device="cpu")
    objective = {name: getattr(config, name, None) for name in ("dpo", "kto", "reward")}
    seen = run.objective, run.seed, run.steps, data.path, data.minibatch_sequences, config.model.path
    seen += tuple(value for name, value in vars(config.model).items() if "4bit" in name)
    return repr((seen, config.model.config, optim, objective, lora))


def expected(config, dataset):
    """The plain loop's losses and parameters, not to be written to."""
    key = dependencies(config)
    if key not in _expected:
        _expected[key] = plain_loop(config, dataset)
    return _expected[key]


def plain_loop(config, dataset, freeze=()):
    reference = torch_reference.initial_model(config)
    freeze_parameters(reference, freeze)
    first = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad and p.dim() > 1}
    losses = torch_reference.train(reference, dataset, first_minibatches(config, dataset), config.optim)
    state = reference.state_dict()
    for name, before in first.items():
        moved = (state[name] - before).norm() / before.norm()
        assert moved > 1e-3, f"{name} hardly moved ({moved:.1e}): whatever stood still would agree"
    return losses, state


def freeze_parameters(module, parts):
    """Freeze parameters whose names contain one of some parts."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not any(part in name for part in parts))


def first_minibatches(config, dataset):
    """The indices of the sequences of each step."""
    sizes = {"minibatch_sequences": config.data.minibatch_sequences, "max_tokens_per_microbatch": 1 << 20}
    draw = Loader(dataset, **sizes, seed=config.run.seed)
    return [minibatch.indices for minibatch in itertools.islice(draw, config.run.steps)]


def run(config, world):
    inputs = open_inputs(config, world.rank, world.size)
    with training(config, world, inputs) as (trainer, steps):
        return inputs.dataset, steps(), trainer.model.state_dict()


@contextlib.contextmanager
def training(config, world, inputs):
    """A trainer, and what takes its steps and returns their metrics."""
    islands = Islands(world, config.islands.by) if config.islands.by != "off" else None
    trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world), islands=islands))
    trainer.callbacks.append(UsageMetrics(world, trainer.model, lambda: 0.0, None))
    yield trainer, lambda: [trainer.step() for _ in range(config.run.steps)]
    world.gather_objects(None)  # state_dict is one-sided: no rank frees windows that another still reads
    trainer.model.close()
    for windows in (getattr(trainer._source, "_windows", None), islands):
        if windows:
            windows.close()


@contextlib.contextmanager
def training_apart(config, world):
    """A trainer on each island, with its callback for merges."""
    islands, added = Islands(world, config.islands.by), []
    part = Part(islands.index, islands.size)
    inputs = open_inputs(config, islands.island.rank, islands.island.size, part)
    context = RunContext(config, islands.island, inputs=inputs, part=part, decision=decide(config, world))
    context.add_callbacks = lambda trainer: added.append(add_diloco(context, islands, trainer))
    trainer = build_trainer(context)
    yield trainer, added[0]
    world.gather_objects(None)
    added[0].free()
    trainer.model.close()
    islands.close()


def save_model(world, path, seed=3, max_shard_size="50GB", in_4_bits=False, **changes):
    """Have rank 0 write a model with new weights; return its directory, which all ranks can read."""
    if world.rank == 0:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(**QWEN2 | changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if in_4_bits:
            model = torch_reference.in_4_bits(model, path.with_suffix(".float"), torch.float32)
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


def assert_close(actual, wanted, rtol=1e-5, atol=1e-7):
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert actual[name].dtype == wanted[name].dtype, name
        torch.testing.assert_close(actual[name], wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
