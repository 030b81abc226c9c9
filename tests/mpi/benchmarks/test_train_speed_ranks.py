"""Every way to train, side by side: that they train the same is found out by their losses."""

from dataclasses import replace

import pytest
import torch
import train_speed
import transformers
from baselines import build_unsharded_model
from small_training import QWEN2, configure

from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.inputs import open_inputs

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


@pytest.fixture
def config(dataset_path):
    """Steps that show a wrong factor at once: no clipping, and no optimizer that does not care for it."""
    config = configure(dataset_path)
    optim = replace(config.optim, optimizer="sgd", learning_rate=0.1, momentum=0.9, max_grad_norm=0.0)
    return replace(config, optim=optim, data=replace(config.data, minibatch_sequences=3))


@pytest.mark.sizes(2, 4)
def test_all_ways_train_the_same(world, config):
    """Three sequences: on four ranks one has none, and runs dummy microbatches with FSDP2."""
    result = train_speed.measure(world, config, steps=2, repeats=1, exact=True)
    assert set(result["tokens_per_s"]) == set(result["loss_deviation"]) == {*train_speed.CONTENDERS, *train_speed.EXACT}
    assert max(result["loss_deviation"].values()) < 1e-5
    assert result["loss_deviation"]["exact/dynamic"] > 0
    assert len(result["losses"]) == 4


def test_one_that_trains_something_else_is_found_out(world, config, monkeypatch):
    step = train_speed.odc_step

    def wrong(*arguments):
        loss, num_tokens = step(*arguments)
        return 1.01 * loss, num_tokens

    monkeypatch.setattr(train_speed, "odc_step", wrong)
    with pytest.raises(AllRanksUserError, match=r"losses of .* and fsdp2 differ by 0\.01"):
        train_speed.measure(world, config, steps=1, repeats=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.param_dtype": "bfloat16"}, "model.param_dtype: train_speed.py supports only float32, got bfloat16"),
        (
            {"model.gradient_checkpointing": "true"},
            "model.gradient_checkpointing: train_speed.py supports only false, got true",
        ),
        ({"run.device": "cuda"}, "run.device: train_speed.py supports only cpu, got cuda"),
        ({"comm.progress": "thread"}, "comm.progress: train_speed.py supports only auto or off, got thread"),
    ],
)
def test_what_only_we_can_do_is_not_compared(world, dataset_path, changes, words):
    with pytest.raises(AllRanksUserError, match=words):
        train_speed.measure(world, configure(dataset_path, **changes), steps=1, repeats=1)


def test_the_full_model_is_in_fp32_whatever_files_hold(world, shared_dir, config):
    path = shared_dir / "narrow"
    if world.rank == 0:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**QWEN2))
        model.to(torch.bfloat16).save_pretrained(path)
    world.gather_objects(None)
    config = replace(config, model=replace(config.model, path=str(path), config=None))
    assert {parameter.dtype for parameter in build_unsharded_model(config).parameters()} == {torch.float32}


def test_the_full_model_is_that_of_a_run(world, config):
    settings = {**config.model.config, "tie_word_embeddings": True}
    config = replace(config, model=replace(config.model, config=settings))
    whole = build_unsharded_model(config)
    meta_model = open_inputs(config, world.rank, world.size).model
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter.view(-1), meta_model.weights.read(name, 0, parameter.numel()))
    assert not any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers()))
