"""A model from a directory of safetensors on several ranks: the plain loop's results."""

import pytest
import torch
import torch_reference
import transformers
from small_training import assert_close, configure, first_minibatches, run, save_model

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.fixture(scope="module")
def directory(world, shared_dir):
    return save_model(world, shared_dir / "model", max_shard_size="40KB")


def test_training_from_a_directory_is_the_plain_loop_s(world, dataset_path, directory):
    config = configure(dataset_path, **{"model.path": directory})
    dataset, metrics, state = run(config, world)

    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    losses = torch_reference.train(reference, dataset, first_minibatches(config, dataset), config.optim)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert_close(state, reference.state_dict())


def transformers_loss(module, dataset, indices):
    tokens, mask = map(torch.from_numpy, dataset[indices[0]])
    return module(input_ids=tokens[None], labels=tokens.where(mask, -100)[None], use_cache=False).loss


def test_the_loss_of_routers_is_that_of_transformers(world, dataset_path, shared_dir):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = save_model(world, shared_dir / "experts", 4, **experts, head_dim=8)
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    # A microbatch is one sequence, since the auxiliary loss is computed per microbatch.
    settings = {"data.minibatch_sequences": 1, "model.path": path}
    config = configure(dataset_path, **settings, **{f"model.config.{key}": value for key, value in routers.items()})
    dataset, metrics, state = run(config, world)

    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", **routers)
    minibatches = first_minibatches(config, dataset)
    losses = torch_reference.train(reference, dataset, minibatches, config.optim, transformers_loss)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert_close(state, reference.state_dict())
