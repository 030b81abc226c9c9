"""Tiny configurations of the families in docs/models.md, made by the configuration classes of transformers."""

import transformers

#: Names of settings by value. Windows and chunks are shorter than most sequences.
_VALUES = {
    512: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size n_embd d_model word_embed_proj_dim lru_width attention_hidden_size",
    96: "intermediate_size ffn_dim intermediate_size_mlp",
    2: "num_hidden_layers num_key_value_heads n_layer n_layers num_experts_per_tok moe_topk moe_k linear_num_key_heads",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim state_size ssm_state_size mamba_d_state linear_key_head_dim "
    "linear_value_head_dim hidden_size_per_layer_input global_head_dim",
    4: "num_attention_heads n_head n_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_n_heads linear_num_value_heads",
    256: "max_position_embeddings n_positions",
    8: "sliding_window rotary_dim attention_chunk_size floor_scale qk_rope_head_dim chunk_size mamba_chunk_size "
    "attention_window_size",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank mamba_d_head",
    1: "n_shared_experts n_group topk_group first_k_dense_replace n_groups",
    0.0: "hidden_dropout_prob attention_probs_dropout_prob router_jitter_noise attn_dropout resid_pdrop embd_pdrop "
    "attn_pdrop attention_dropout hidden_dropout dropout activation_dropout layerdrop resid_dropout residual_dropout "
    "input_jitter_noise",
}
#: Settings of all families, as far as a family has them.
_COMMON = {name: value for value, names in _VALUES.items() for name in names.split()}
_COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"head_dim": None, "num_key_value_heads": 4}  # latent attention
_DECODER = {"decoder_attention_heads": 4, "encoder_attention_heads": 4}
_HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "head_dim": None,
    "use_mamba_kernels": False,
}
_WINDOWS = ["sliding_attention", "full_attention"]
_MIXED = ["full_attention", "conv"]
_NAMES = """
llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text gemma4_text phi phi3 olmo olmo2 olmo3 gpt2
gpt_neox gptj gpt_bigcode starcoder2 cohere cohere2 granite glm glm4 smollm3 exaone4 helium stablelm nemotron persimmon
opt falcon bloom mpt codegen seed_oss arcee apertus hunyuan_v1_dense ernie4_5 diffllama nanochat cwm vaultgemma
modernbert-decoder biogpt xglm gpt_neo exaone gemma3n_text bitnet doge hrm_text mixtral qwen2_moe qwen3_moe olmoe
glm4_moe phimoe granitemoe ernie4_5_moe dots1 deepseek_v2 deepseek_v3 gpt_oss hunyuan_v1_moe minimax_m2 flex_olmo afmoe
llama4_text longcat_flash dbrx exaone_moe glm4_moe_lite mimo_v2_flash jetmoe deepseek_v32 deepseek_v4 minimax
qwen3_next qwen3_5_text mamba mamba2 recurrent_gemma rwkv jamba granitemoehybrid bamba lfm2 lfm2_moe falcon_h1
nemotron_h falcon_mamba zamba zamba2 zaya
"""
#: Multimodal models, of which the text model is trained.
COMPOSITES = ["gemma3", "mistral3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
#: Values of `model_type`, in the order of the table.
FAMILIES = _NAMES.split() + COMPOSITES
#: Settings of vision and audio towers, as far as a tower has them.
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "depth": 1,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "num_channels": 3,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
#: Settings of a family that differ from the common ones. None leaves out a common setting.
_OWN = {
    "gemma3_text": {"layer_types": _WINDOWS},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "llama4_text": {"no_rope_layers": [1, 0]},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 4},
    "rwkv": {"rescale_every": 0},
    "mamba2": {"num_heads": 8, "expand": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "lfm2": {"layer_types": _MIXED},
    "lfm2_moe": {"layer_types": _MIXED},
    "falcon_h1": {"mamba_d_ssm": 128},
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "num_key_value_heads": 4, "zero_expert_num": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "zamba": _HYBRID | {"mamba_dt_rank": 4},
    "zamba2": _HYBRID | {"n_mamba_heads": 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"layer_types": ["hybrid"] * 2, "num_experts_per_tok": 1, "router_hidden_size": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _WINDOWS * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    **dict.fromkeys(("axk1", "axk2", "glm_moe_dsa", "youtu", "dots3_note_text", "minicpm3", "sarvam_mla"), _LATENT),
    "dots3_note": {
        "mlp_layer_types": ["dense"],
        **dict.fromkeys(("adapter_in_dim", "adapter_input_size"), 32),
        "adapter_out_dim": 64,
    },  # of its towers
    **dict.fromkeys(("plbart", "whisper", "musicgen"), _DECODER),
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _WINDOWS},
        "layer_types": _WINDOWS,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "nemotron_h": {"hybrid_override_pattern": "M*E-", "num_hidden_layers": None},
}


def tiny_config(family):
    """Return a tiny configuration of a family, or None if transformers does not have the family."""
    if family not in transformers.CONFIG_MAPPING:
        return None
    kind = transformers.CONFIG_MAPPING[family]
    default = kind()
    parts = {name: part for name in kind.sub_configs if (part := getattr(default, name, None)) is not None}
    if "text_config" in parts:
        return _tiny_composite(family, kind, parts)
    settings = {name: value for name, value in _COMMON.items() if name in default.to_dict()}
    aliases = [name for name, other in default.attribute_map.items() if other not in settings]
    settings |= {name: _COMMON[name] for name in aliases if name in _COMMON}
    settings |= _tiny_towers(parts) | _OWN.get(family, {})
    return kind(**{name: value for name, value in settings.items() if value is not None})


def _tiny_composite(family, kind, parts):
    text = tiny_config(parts.pop("text_config").model_type).to_dict()
    if family.startswith(("qwen2", "qwen3_vl")):
        text["rope_parameters"] |= {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    towers = _tiny_towers(parts, **_OWN.get(family, {}))
    return kind(text_config=text, **towers, tie_word_embeddings=False)


def _tiny_towers(parts, **settings):
    """Return small settings of vision and audio towers; not of the decoder of another model."""
    return {
        name: {key: value for key, value in (_TOWER | settings).items() if key in part.to_dict()}
        | {"model_type": part.model_type}
        for name, part in parts.items()
        if name in ("vision_config", "audio_config")
    }
