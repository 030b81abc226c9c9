"""Every type of rotary embedding of transformers, on sequences shorter and longer than those of its pretraining."""

import pytest
import torch
from packed_models import materialized
from tiny_qwen2 import SIZES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.models import build as models

ORIGINAL = 16  # positions in pretraining
HALF = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
KNOWN = {"original_max_position_embeddings": ORIGINAL}
FACTORS = {"short_factor": [1 + 0.1 * i for i in range(HALF)], "long_factor": [2 + 0.5 * i for i in range(HALF)]}
TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **KNOWN},
    "longrope": {**FACTORS, **KNOWN},
    "proportional": {"partial_rotary_factor": 0.5},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **KNOWN},
}


def test_all_types_are_tried():
    assert TYPES.keys() == {"default", *ROPE_INIT_FUNCTIONS}


def rope_of(rope_type):
    return {"rope_type": rope_type, "rope_theta": 1e4, **TYPES[rope_type]}


PHI = {"rope_parameters": rope_of("longrope"), "pad_token_id": 0, **KNOWN}
ROPES = {"sliding_attention": rope_of("default"), "full_attention": rope_of("longrope")}
BY_LAYER = {"layer_types": [*ROPES], "sliding_window": 8, "head_dim": 8, "rope_parameters": ROPES}
CASES = [("llama", {"rope_parameters": rope_of(each)}) for each in TYPES] + [("phi3", PHI), ("gemma3_text", BY_LAYER)]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[*TYPES, "phi3", "by_layer"])
def test_loss_of_short_and_long_sequences_in_any_order(family, changes):
    """The output for a sequence is that of a model of transformers that has computed no other sequence."""
    settings = SIZES | changes
    meta_model = models.from_config({"model_type": family, **settings}, seed=0)
    module = materialized(meta_model).eval()
    module.tie_weights()
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    tokens = torch.randint(3, 60, (64,))
    packs = meta_model.packing.packs
    assert packs == ("longrope" not in str(changes))
    for lengths in [[10, 50, 4]] if packs else [[10], [50], [4]]:
        sequences = tokens[: sum(lengths)].split(lengths)
        with torch.no_grad():
            logits = module(**packed_inputs(torch.cat(sequences).numpy(), lengths)).logits[0].split(lengths)
        for sequence, found in zip(sequences, logits, strict=True):
            reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
            reference.load_state_dict(module.state_dict())
            with torch.no_grad():
                wanted = reference.eval()(input_ids=sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
