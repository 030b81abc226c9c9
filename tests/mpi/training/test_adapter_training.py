"""Adapters over windows: checkpoints of them alone, and what they cost."""

import contextlib
import json

import pytest
import small_training
from small_training import QWEN2

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.load import load_model
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.train import train

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2, 3),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]


def configure(dataset_path, **changes):
    adapters = {"lora.r": 4, "lora.alpha": 16, "optim.warmup_steps": None, "run.steps": 4, "run.resume": "never"}
    return small_training.configure(dataset_path, **(adapters | changes))


def test_frozen_parameters_cost_nothing_in_a_backward(world, dataset_path):
    config = configure(dataset_path)
    inputs = open_inputs(config, world.rank, world.size)
    with small_training.training(config, world, inputs) as (trainer, _):
        check_costs(world, inputs, trainer)


def check_costs(world, inputs, trainer):
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
