"""Names of settings in other libraries, without their sections: those that odc_mpi accepts, and advice for the rest.

The libraries are transformers, TRL, peft, axolotl, torchtitan and, for DiLoCo, torchft, MaxText and OpenDiLoCo.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Any

#: Settings of odc_mpi, keyed by their names in other libraries.
ALIASES = {
    **dict.fromkeys(("model_name_or_path", "base_model", "base_model_name_or_path", "hf_assets_path"), "model.path"),
    **dict.fromkeys(("bf16", "torch_dtype", "dtype"), "model.param_dtype"),
    "activation_checkpointing": "model.gradient_checkpointing",
    "torch_compile": "model.compile",
    "load_in_4bit": "model.load_in_4bit",
    "use_bnb_nested_quant": "model.bnb_4bit_use_double_quant",
    **{f"lora_{name}": f"lora.{name}" for name in ("r", "alpha", "dropout", "target_modules", "target_parameters")},
    "lora_modules_to_save": "lora.modules_to_save",
    **dict.fromkeys(("lora_layers_to_transform", "peft_layers_to_transform"), "lora.layers_to_transform"),
    "lr": "optim.learning_rate",
    **dict.fromkeys(("min_lr_rate", "min_lr_factor", "cosine_min_lr_ratio"), "optim.min_lr_ratio"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "optim.lr_scheduler_type"),
    **dict.fromkeys(("beta1", "adam_b1"), "optim.adam_beta1"),
    **dict.fromkeys(("beta2", "adam_b2"), "optim.adam_beta2"),
    **dict.fromkeys(("eps", "adam_eps"), "optim.adam_epsilon"),
    **dict.fromkeys(("max_norm", "gradient_clipping", "gradient_clip_val"), "optim.max_grad_norm"),
    **dict.fromkeys(("max_steps", "num_steps", "max_train_steps"), "run.steps"),
    **dict.fromkeys(("num_epochs", "epochs"), "run.num_train_epochs"),
    "eval_steps": "run.eval_every",
    "save_steps": "run.checkpoint_every",
    **dict.fromkeys(("save_total_limit", "keep_latest_k"), "run.keep_checkpoints"),
    **dict.fromkeys(("output_dir", "dump_folder"), "run.dir"),
    "resume_from_checkpoint": "run.resume",
    "use_cpu": "run.device",
    **dict.fromkeys(("sync_steps", "diloco_sync_period", "local_steps", "inner_steps"), "islands.sync_every"),
    **dict.fromkeys(("outer_lr", "diloco_outer_lr"), "islands.outer_learning_rate"),
    "diloco_outer_momentum": "islands.outer_momentum",
    "num_fragments": "islands.fragments",
    "fragment_sync_delay": "islands.delay",
    "fragment_update_alpha": "islands.local_share",
}
#: Values in other libraries that differ from the equivalent value here, keyed by the name of the setting there.
VALUES: Mapping[str, Mapping[Hashable, Any]] = {
    "bf16": {True: "bfloat16", False: "float32"},
    "max_steps": {-1: 0},
    "save_total_limit": {None: 0},
    "resume_from_checkpoint": {True: "auto", False: "never", None: "auto"},
    "use_cpu": {True: "cpu", False: "auto"},
    "report_to": {"none": []},
    "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "scale_rewards": {True: "group", False: "none"},
    "log_completions": {True: 1, False: 0},
}
#: Advice on other names. Each line of advice is followed by indented patterns for the names.
_TEXT = r"""
optim is a section here: set optim.optimizer to adamw or sgd
    optim|optim_args|optim_target_modules
rl is a section here: set run.objective to sft, dpo, kto, reward, grpo or distill; sections are dpo, kto, reward and rl
    rl|trl
set data.minibatch_sequences, the sequences per step on all ranks together
    (per_device_|auto_find_|micro_|local_|global_)?(train_)?batch_size|num_tokens_per_train_step
    gradient_accumulation_steps|generation_batch_size|steps_per_generation
not needed: data.max_tokens_per_microbatch limits the memory of evaluation, too
    (per_device_)?eval_batch_size|eval_accumulation_steps|batch_eval_metrics|eval_do_\w+|eval_use_\w+
not needed: sequences are always packed without padding, up to data.max_tokens_per_microbatch
    (eval_)?(sample_)?packing(_strategy)?|padding_free|pad_to_\w+|group_by_length|length_column_name
set run.seed, which decides the order of the data; run.exact gives the same bits on any number of ranks
    train_sampling_strategy|shuffle_dataset|data_seed|full_determinism|ignore_data_skip
set odc-mpi prepare --max-length; and data.max_tokens_per_microbatch, the tokens of one forward
    max_(seq_|prompt_|context_)?length|seq_len|sequence_len|truncation_mode|num_tokens_per_microbatch_\w+
decided by odc-mpi prepare, whose output data.path names: see odc-mpi prepare --help
    dataset\w*|(\w+_)?dataset|(train|eval)_file|test_datasets|chat_template\w*|(completion|assistant)_only_loss
    (eos|pad|special|eot)_tokens?|tokens|val_set_size|tokenizer_\w+|train_on_\w+|remove_unused_columns|label_names
set data.context_parallel to auto, which splits the longest sequences
    (context_parallel|cp)_(size|degree)
set islands.by to node, or to the number of ranks over which each copy of the parameters is sharded
    data_parallel_(replicate|shard)_degree|dp_(replicate|shard)_(size|degree)|hsdp_shard_size|fsdp_sharding_strategy
    zero_hpz_partition_size|mics_shard_size
set islands.mode to outer, and islands.by (docs/islands.md)
    (enable_|use_)?diloco|semi_sync_method|num_diloco_replicas|outer_optim\w*
set islands.wire to bfloat16, int8, e3m0 or topk
    should_quantize|upload_dtype|(outer_)?compression
not needed: parameters, gradients and optimizer states are always sharded over the ranks
    fsdp\w*|deepspeed|ds3_\w+|ddp_\w+|local_rank|parallelism_config|accelerator_config|average_tokens_\w+
    megatron_\w+|\w*_parallel_(size|degree)|data_parallel_\w+|dp_\w+_size|enable_cpu_offload
not needed: rollouts are generated by the model that is trained, in the same processes, for each step
    use_vllm|vllm_\w+|use_transformers_\w+|transformers_continuous_\w+|cache_implementation|use_cache
    epsilon\w*|delta|importance_sampling_\w+|off_policy_\w+|use_bias_correction_kl|sapo_\w+|vespo_\w+
not needed: with dpo, the log-probabilities of the reference model are computed before the first step
    precompute_ref_\w+
not supported: dpo.beta, dpo.loss_type, dpo.loss_weights and dpo.label_smoothing choose the loss
    f_(alpha_)?divergence_\w+|discopop_tau|ld_alpha|use_weighting
not supported: the loss has no label smoothing, and no noise is added to embeddings
    label_smoothing_factor|neftune_noise_alpha
not supported: the reference model is the one at the start, unchanged
    (ref_model|sync_ref)_\w+
not supported: rl.temperature, rl.top_p and rl.top_k select the tokens; rl.reward_weights the rewards
    min_p|repetition_penalty|generation_kwargs|num_generations_eval|multi_objective_\w+|max_tool_\w+
not supported by the losses here: see rl.loss_type
    (?!liger|flash)(\w+_)?entropy(_\w+)?
set rl.log_completions, the steps between printed completions
    log_multimodal|num_completions_to_print|log_unique_prompts|log_completions_hub_repo
not needed: dropout is off with run.objective dpo, kto, reward, grpo and distill
    disable_dropout
not needed: every step is logged, in the table and in metrics.jsonl
    logging_\w+|log_(level|on|freq)\w*|include_\w+|disable_tqdm|debug|skip_memory_metrics|prediction_loss_only
set run.dir, whose name is the run's, and run.report_to
    run_name|project|(trackio|wandb|mlflow)_\w+|(use|enable)_(tensorboard|trackio|wandb|mlflow)
set data.eval_path, and run.eval_every to the steps between evaluations
    eval(uation)?_strategy|do_eval|do_train|do_predict|eval_delay|evals_per_epoch|validator
set run.keep_best, which keeps the checkpoint with the lowest eval loss or the highest reward
    load_best_model_at_end|metric_for_best_model|greater_is_better|early_stopping\w*
set run.checkpoint_every to the steps between checkpoints; the last step is always saved
    save_(strategy|only_model|safetensors|on_each_node)|saves_per_epoch|interval|enable_jit_checkpoint
    restore_callback_\w+
export with odc-mpi export, then upload with hf upload
    push_to_hub|hub_\w+
set model.param_dtype; sums are float32
    fp16\w*|tf32|bf16_full_eval|cast_lm_head_to_fp32|mixed_precision\w*
set model.compile
    torch_compile_\w+|use_(liger_kernel|kernels)|liger_\w+|lora_\w+_kernel|flash_attn_\w+|torch_empty_cache_steps
set model.attn_implementation to sdpa or eager
    (flash|flex|sage|sdp|eager|xformers|s2)_attention
set model.gradient_checkpointing to true
    (gradient|activation)_(checkpointing_kwargs|offloading)|activation_checkpoint
set optim.min_lr_ratio and optim.decay_ratio
    lr_scheduler_kwargs|min_lr|cosine_constant_lr_ratio|decay_type
set run.steps, over which the learning rate decays
    total_steps
set model.config, entries of the model's config.json
    router_aux_loss_coef|model_init_kwargs|rope_\w+
    (overrides_of_)?model_(config|kwargs)|experts_implementation
not needed: config.json in model.path names the type
    (model|processor)_type|type_of_model
set run.checkpoint_every, run.keep_checkpoints, run.resume and run.dir
    lora_model_dir|checkpoint
append it to the name in model.path: OWNER/NAME@REVISION
    (model_)?revision(_of_model)?
not supported: code of models is never run
    trust_remote_code
not needed: sequences are read from the HDF5 file as they are used
    dataloader_\w+
set model.load_in_4bit and model.bnb_4bit_quant_type; products are computed in model.param_dtype
    bnb_4bit_\w+|(model_)?quantization_config
not supported: bases are quantized to 4 bits by bitsandbytes only, with model.load_in_4bit
    load_in_8bit|bnb_\w+|(model_)?quantization\w*|gptq\w*|qat
set lora.r; all linear layers get adapters by default
    adapter|peft_config|use_peft|lora_target_linear|peft_\w+
not needed: set lora.target_modules and lora.layers_to_transform
    (lora_)?task_type|auto_mapping|inference_mode|runtime_config|fan_in_fan_out|exclude_modules|layers_pattern
not supported: plain LoRA only, with lora.r, lora.alpha and lora.dropout
    (lora_)?bias|init_lora_weights|\w+_pattern|use_\w*(lora|dora)|qalora_\w+|\w+_config|layer_replication|alora_\w+
set lora.modules_to_save
    trainable_token_indices|ensure_weight_tying
set rl.reward_funcs to the directory of the reward model
    reward_model_path\w*
"""
#: `_TEXT` as pairs of a pattern and its advice. The first pattern that matches the full name applies.
_ANSWERS = [
    ("|".join(patterns.split()), text)
    for text, patterns in re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", _TEXT, re.MULTILINE)
]


def answer(name: str) -> str | None:
    """Return advice about another library's setting, such as the setting to use instead, or None if there is none."""
    return next((text for pattern, text in _ANSWERS if re.fullmatch(pattern, name)), None)


def convert(name: str, value: Any) -> Any:
    """Convert a value of another library's setting `name` to the value used here. Most values do not change."""
    values = VALUES.get(name, {})
    return values[value] if isinstance(value, Hashable) and value in values else value


def is_flag(name: str) -> bool:
    """Return True if ``--name`` is a flag in another library but the matching setting here is not a boolean."""
    return True in VALUES.get(name, {})
