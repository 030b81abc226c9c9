"""The check of models for context parallelism, on the meta device, and the sizes of what attention transfers."""

import pytest
import tiny_qwen2

from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.build import from_config
from odc_mpi.models.context_parallel_check import AttentionShape, attention_shape

SIZES = tiny_qwen2.SIZES | {"num_hidden_layers": 3}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}


def compute_shape(settings, num_tokens=100):
    return attention_shape(from_config(settings, 0).module, num_tokens)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "olmo2"])
def test_models_with_context_parallelism(kind):
    head_dim = 128 if kind == "qwen3" else 8  # its default, whatever the hidden size
    assert compute_shape({"model_type": kind, **SIZES}) == AttentionShape(3, 2 * 2 * head_dim)


def test_a_window_that_holds_the_longest_sequence_is_none():
    settings = {"model_type": "mistral", **SIZES, "sliding_window": 100}
    assert compute_shape(settings, 100).num_layers == 3
    with pytest.raises(ContextParallelUnsupportedError, match="a window of 100 tokens"):
        compute_shape(settings, 101)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "llama", **SIZES, "attention_dropout": 0.1}, "dropout of attention weights"),
        ({**GPT2, "attn_pdrop": 0.1}, "dropout of attention weights"),
        (
            {"model_type": "llama", **SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary frequencies depend on the length: dynamic",
        ),
        ({"model_type": "mixtral", **SIZES, "output_router_logits": True}, "balance of experts"),
    ],
)
def test_models_without_context_parallelism(settings, words):
    with pytest.raises(ContextParallelUnsupportedError, match=words):
        compute_shape(settings)
