"""Adapters over windows: losses and weights of peft in plain torch, checkpoints of them alone, and what they cost."""

import contextlib
import itertools
import json

import pytest
import small_training
import torch
import torch_reference
from packed_models import first_values
from small_training import QWEN2

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.load import load_model
from odc_mpi.training import source
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.train import train

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2, 3),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]

STEPS = 4
PREFIX = "base_model.model."


def configure(dataset_path, **changes):
    adapters = {"lora.r": 4, "lora.alpha": 16, "optim.warmup_steps": None, "run.steps": STEPS, "run.resume": "never"}
    return small_training.configure(dataset_path, **(adapters | changes))


def run(config, world):
    inputs = open_inputs(config, world.rank, world.size)
    first = first_values(inputs.model)
    with small_training.training(config, world, inputs) as (trainer, steps):
        return inputs, [line["loss"] for line in steps()], first, trainer.model.state_dict()


def peft_model(config, inputs, attention="sdpa"):
    """peft's own model on one process, with the same first values."""
    model = torch_reference.initial_model(config)
    for parameter in model.parameters():  # `to` would round rotary frequencies, too
        parameter.data = parameter.to(getattr(torch, config.model.param_dtype))
    model.set_attn_implementation(attention)
    lora = dict(vars(config.lora))
    settings = {f"lora_{name}": lora.pop(name) for name in ("alpha", "dropout")}
    return torch_reference.with_adapters(model, inputs.model.weights, **lora, **settings)


def trained_in(model):
    return {name.removeprefix(PREFIX): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def reference(config, inputs):
    """Losses and adapters of a plain loop, one sequence at a time."""
    model = peft_model(config, inputs)
    indices = small_training.first_minibatches(config, inputs.dataset)
    return torch_reference.train(model, inputs.dataset, indices, config.optim), trained_in(model)


def packed_reference(config, inputs, size):
    """Losses and adapters of a plain loop over the microbatches of all ranks, each seeded as a run seeds it."""
    model, optim = peft_model(config, inputs, "odc_packed").train(), config.optim
    optimizer, losses = torch_reference.make_optimizer(model, optim), []
    for group in optimizer.param_groups:
        group["lr"] = optim.learning_rate
    loaders = (open_inputs(config, rank, size).loader for rank in range(size))
    for of_ranks in itertools.islice(zip(*loaders, strict=True), config.run.steps):
        total = 0.0
        for minibatch in of_ranks:
            for batch in minibatch:
                torch.manual_seed(source._seed(config.run.seed, minibatch.data_epoch, int(batch.indices[0])))
                loss = model(**batch.inputs).loss * (batch.num_tokens / minibatch.num_tokens)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, trained_in(model)


def assert_trained_alike(state, trained, rtol=1e-5, atol=1e-6):
    for name, value in trained.items():
        assert state[name].dtype == value.dtype, name
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("balance", "targets", "saved"),
    [
        ("lb_mini", "all-linear", None),
        ("lb_mini", "[q_proj,v_proj]", "[lm_head,norm]"),
        ("dynamic", "all-linear", None),
    ],
    ids=["all linear", "and whole modules", "tickets"],
)
def test_losses_and_adapters_equal_peft(world, dataset_path, balance, targets, saved):
    changes = {"data.balance": balance, "lora.target_modules": targets, "lora.modules_to_save": saved}
    config = configure(dataset_path, **changes, **{"model.config.tie_word_embeddings": "false"})
    inputs, losses, first, state = run(config, world)
    wanted, trained = reference(config, inputs)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert {name for name in state if ".lora_" in name or "modules_to_save" in name} == trained.keys()
    assert_trained_alike(state, trained)
    for name, value in state.items():
        if name in trained:
            assert not torch.equal(value, first[name]), f"{name} stood still"
        elif name in first:
            assert torch.equal(value, first[name]), f"{name} is frozen"


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.dropout": 0.3},
        {"model.param_dtype": "bfloat16"},
        {"lora.dropout": 0.3, "model.gradient_checkpointing": "true"},
    ],
    ids=["dropout", "bf16 base", "dropout, recomputed"],
)
def test_the_same_microbatches_equal_peft(world, dataset_path, changes):
    settings = {"data.balance": "lb_mini", "optim.lr_scheduler_type": "constant"} | changes
    config = configure(dataset_path, **settings)
    inputs, losses, _, state = run(config, world)
    wanted, trained = packed_reference(config, inputs, world.size)
    if config.model.param_dtype == "float32":
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert_trained_alike(state, trained, 1e-4, 1e-6)
    else:  # sums in another order round to other activations: elements move by 3e-4, arrays by 3e-3 of their norm
        assert losses == pytest.approx(wanted, rel=1e-3)
        for name, value in trained.items():
            assert (state[name] - value).norm() <= 2e-2 * value.norm(), name
    assert {value.dtype for name, value in state.items() if ".lora_" in name} == {torch.float32}
    base = {value.dtype for name, value in state.items() if "base_layer" in name}
    assert base == {getattr(torch, config.model.param_dtype)}


def test_frozen_parameters_cost_nothing_in_a_backward(world, dataset_path):
    config = configure(dataset_path)
    inputs = open_inputs(config, world.rank, world.size)
    trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world)))
    model, gradients, pushed = trainer.model, trainer.model._transport.gradients, set()
    push = gradients.push

    def record_push(index, gradient, start=0):
        pushed.add(index)
        return push(index, gradient, start)

    gradients.push = record_push
    trainer.step()
    trained = {index for index, layout in enumerate(model.layouts) if layout.trainable}
    num_layers = QWEN2["num_hidden_layers"]
    assert (len(trained), len(model.layouts)) == (num_layers, 2 * num_layers + 1), "one array of each layer"
    assert any(world.gather_objects(pushed)) and pushed <= trained
    for index, layout in enumerate(model.layouts):
        with contextlib.nullcontext() if index in trained else pytest.raises(KeyError):
            assert gradients.shard(index).nbytes == 4 * layout.shard_numel
    numel = sum(p.numel() for name, p in inputs.model.module.named_parameters() if ".lora_" in name)
    states = (value for kept in trainer.update.optimizer.state.values() for value in kept.values() if value.dim())
    assert sum(world.gather_objects(sum(value.numel() for value in states))) == 2 * numel, "AdamW's two moments"
    world.gather_objects(None)
    model.close()


@pytest.fixture(scope="module")
def saved(world, shared_dir, dataset_path):
    """A run of two steps over a base on disk, which has saved; its directory, that of the base, and its settings."""
    base, run_dir = small_training.save_model(world, shared_dir / "base"), shared_dir / "adapters"
    settings = {f"model.config.{key}": None for key in QWEN2} | {"model.path": base, "run.resume": "auto"}
    settings |= {"run.dir": run_dir, "optim.lr_scheduler_type": "constant", "data.balance": "lb_mini"}
    train(configure(dataset_path, **settings, **{"run.steps": 2, "run.checkpoint_every": 2}), world)
    world.gather_objects(None)
    return run_dir, base, settings


def losses_in(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_has_the_adapters_and_a_reference(world, saved):
    run_dir, base, _ = saved
    with open_newest_checkpoint(run_dir) as checkpoint:
        kinds = {(record.kind, ".lora_" in path) for path, record in checkpoint.manifest.tensors.items()}
        assert kinds == {("trainable", True), ("state", True)}
        reference = checkpoint.manifest.metadata["base"]
    assert reference["path"] == str(base) and reference["sha256"].keys() == {"model.safetensors:0"}
    meta_model = load_model(run_dir, world.rank, world.size)
    name = "model.layers.1.mlp.up_proj.lora_B.default.weight"
    assert meta_model.weights.read(name, 0, 8).abs().min() > 0, "it is trained"
    assert {p.device.type for p in meta_model.module.parameters()} == {"meta"}


def test_a_run_goes_on(world, saved, dataset_path, shared_dir):
    run_dir, _, settings = saved
    train(configure(dataset_path, **(settings | {"run.dir": shared_dir / "whole", "run.steps": 4})), world)
    train(configure(dataset_path, **(settings | {"run.steps": 4})), world)
    world.gather_objects(None)
    assert losses_in(run_dir) == pytest.approx(losses_in(shared_dir / "whole"), rel=1e-5)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora.alpha": 32}, "lora.alpha: expected 16"),
        ({"lora.r": None, "lora.alpha": None}, "is of adapters, got no lora.r"),
        ({"lora.target_modules": "[q_proj]"}, "of another model: .* is trainable .* there, absent in this one"),
    ],
    ids=["alpha", "none", "targets"],
)
def test_other_adapters_are_refused(world, saved, dataset_path, changes, words):
    with pytest.raises(AllRanksUserError, match=words):
        train(configure(dataset_path, **(saved[2] | {"run.steps": 9} | changes)), world)
