"""Sequences in padded rows, and the trial that decides whether a model computes them as it does alone."""

import pytest
import torch
from packed_models import assert_packed_like_single
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.models import build as models
from odc_mpi.models.packed import padded_rows
from odc_mpi.models.packed.padded_rows import PaddedRows, equals_single_sequences
from odc_mpi.models.packed.small_model import small_config, small_model

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LFM2 = SIZES | {"layer_types": ["conv", "full_attention"]}


@pytest.fixture
def lfm2():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **LFM2), dtype=torch.float64).eval()


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba", "nemotron_h"])
def test_published_sizes_are_tried_with_a_small_copy(family):
    config = CONFIG_MAPPING[family]()
    before = config.to_dict()
    assert equals_single_sequences(config) and config.to_dict() == before
    with small_model(config) as module:
        assert sum(parameter.numel() for parameter in module.parameters()) < 10_000_000
        assert module.config.num_hidden_layers == config.num_hidden_layers


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 60, "num_attention_heads": 3}, {"num_key_value_heads": 4}])
def test_heads_and_widths_shrink_by_one_factor(settings):
    config = AutoConfig.for_model("qwen2", **SIZES | settings)
    small = small_config(config)
    factor = config.hidden_size // small.hidden_size
    assert factor > 1 and config.num_attention_heads == factor * small.num_attention_heads
    assert small.num_attention_heads % small.num_key_value_heads == 0


@pytest.mark.parametrize("leak", ["a state", "shifted outputs", "an error"])
def test_the_trial_notices(monkeypatch, leak):
    """With the convolution as in one row, with outputs of other tokens, or if the model cannot run."""

    def pad(sequences, batch_first):
        row = torch.cat(sequences)
        rows = pad_sequence(sequences, batch_first=batch_first)
        return {"a state": torch.stack([row] * 3)[:, : rows.shape[1]], "shifted outputs": rows.roll(1, 1)}[leak]

    assert equals_single_sequences(AutoConfig.for_model("lfm2", **LFM2))
    monkeypatch.setattr(padded_rows, "pad_sequence", pad)
    assert not equals_single_sequences(AutoConfig.for_model("lfm2", **LFM2))


def test_routers_and_lengths_in_rotary_frequencies_exclude_padding():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    settings = {"model_type": "lfm2", **LFM2}
    assert models.from_config(settings, 0).packing.pads_rows
    assert not models.from_config(settings | {"rope_parameters": rope}, 0).packing.pads_rows
    experts = {"model_type": "qwen3_next", **SIZES, "num_experts": 4, "moe_intermediate_size": 8}
    assert models.from_config(experts, 0).packing.pads_rows
    assert not models.from_config(experts | {"output_router_logits": True}, 0).packing.pads_rows


@pytest.mark.parametrize("wrapped", ["adapters", "in full"])
def test_outputs_under_a_head_that_peft_wraps(lfm2, wrapped):
    from peft import LoraConfig, inject_adapter_in_model

    PaddedRows(lfm2)
    targets = {"target_modules": ["lm_head"]} if wrapped == "adapters" else {"modules_to_save": ["lm_head"]}
    lfm2.config.tie_word_embeddings = False
    inject_adapter_in_model(LoraConfig(**{"target_modules": ["out_proj"]} | targets), lfm2)
    assert_packed_like_single(lfm2, lfm2, torch.randint(3, 60, (20,)), [7, 1, 12], rtol=1e-9, atol=1e-9)


def test_a_single_sequence_stays_as_it_is_and_rows_are_forgotten(lfm2):
    PaddedRows(lfm2)
    tokens = torch.randint(3, 60, (8,))
    alone = lfm2(input_ids=tokens[None], use_cache=False).logits
    lfm2(**packed_inputs(tokens.numpy(), [3, 5]))
    assert torch.equal(lfm2(**packed_inputs(tokens.numpy(), [8])).logits, alone)
    assert torch.equal(lfm2(input_ids=tokens[None], use_cache=False).logits, alone)
