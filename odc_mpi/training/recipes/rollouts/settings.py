"""The section `rl` of the settings. Those that TRL's `GRPOConfig` has have the same names and defaults."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from odc_mpi.setting_types import NON_EMPTY_NAMES, NOT_NEGATIVE, ONE_OR_MORE, POSITIVE, Check, Size
from odc_mpi.training.parsing.conflicts import Conflicts

_OF_PROMPTS = ("messages", "tools", "add_generation_prompt")
_NOT_EMPTY = Check("not empty", lambda value: value != "")
_PROBABILITY = Check("above 0 and at most 1", lambda value: 0 < value <= 1)
_SHARE = Check("from 0 to 1", lambda value: 0 <= value <= 1)
_STEPS = Check("from 0 to 32", lambda value: 0 <= value <= 32)
_FRACTION = Check("above 0 and below 1", lambda value: 0 < value < 1)
#: Weights of tokens that an older policy generated; see `rollouts.weights`.
SamplingMode = Literal["clip", "token_truncate", "token_mask", "sequence_mask", "geometric_mask", "none"]
_VARIABLES = Check(
    "names of variables other than messages, tools and add_generation_prompt",
    lambda value: all(name.isidentifier() and name not in _OF_PROMPTS for name in value),
)
_WORKERS = Check("from 0 to 256", lambda value: 0 <= value <= 256)
_OF_WEIGHTS = ("stale_kv", "importance_sampling_mode", "importance_sampling_clip_max", "epsilon", "epsilon_high")
_NO_EFFECT = "it has no effect"
_STORE_BYTES = Size(16 << 20)


@dataclass(frozen=True)
class RLConfig:
    """Settings for training on completions: rewards, sampling and loss."""

    reward_funcs: Annotated[
        list[str] | None, "module:name, file.py:name, a built-in, or a reward model; docs/rewards.md", NON_EMPTY_NAMES
    ] = None
    reward_weights: Annotated[list[float] | None, "weight of each reward function; null: 1.0 each"] = None
    tokenizer: Annotated[str | None, "tokenizer: directory, hub name, run or data set; null: model.path"] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, "variables of the chat template, such as enable_thinking", _VARIABLES
    ] = None
    teacher_path: Annotated[str | None, "distill: model to learn from: directory, hub name or run", _NOT_EMPTY] = None
    num_generations: Annotated[int, "completions per prompt; grpo needs several", ONE_OR_MORE] = 8
    max_completion_length: Annotated[int, "most tokens of a completion", ONE_OR_MORE] = 512
    temperature: Annotated[float, "temperature of the softmax, in sampling and in training", POSITIVE] = 1.0
    top_p: Annotated[float, "nucleus sampling threshold; 1: off", _PROBABILITY] = 1.0
    top_k: Annotated[int, "sample from the k most likely tokens; 0: off", NOT_NEGATIVE] = 0
    min_p: Annotated[float, "least probability, relative to the most likely token; 0: off", _SHARE] = 0.0
    repetition_penalty: Annotated[float, "divides logits of tokens that have occurred; 1: off", POSITIVE] = 1.0
    beta: Annotated[float, "weight of the KL divergence from model.path; 0: none", NOT_NEGATIVE] = 0.0
    loss_type: Annotated[
        Literal["dapo", "grpo", "dr_grpo"], "divide by tokens, by completions and their lengths, or by a constant"
    ] = "dapo"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"], "divide advantages by the std of the group, or of all rewards of the step"
    ] = "group"
    mask_truncated_completions: Annotated[bool, "exclude truncated completions from the loss"] = False
    num_iterations: Annotated[int, "updates per rollout: only 1 is supported", ONE_OR_MORE] = 1
    max_staleness: Annotated[
        int, "steps by which completions may be older than the step that trains them; 0: on-policy", _STEPS
    ] = 0
    stale_kv: Annotated[
        Literal["keep", "recompute"], "keys and values of completions in progress, when parameters change"
    ] = "keep"
    importance_sampling_mode: Annotated[SamplingMode, "with max_staleness: weights of old tokens; docs/rewards.md"] = (
        "clip"
    )
    importance_sampling_clip_max: Annotated[float, "largest ratio of probabilities of an old token", ONE_OR_MORE] = 3.0
    epsilon: Annotated[float, "clip: how far the ratio may fall below 1, if the advantage is negative", _FRACTION] = 0.2
    epsilon_high: Annotated[
        float | None, "clip: how far it may exceed 1, if the advantage is positive; null: epsilon", POSITIVE
    ] = None
    max_concurrent_sequences: Annotated[int, "most completions that a rank decodes at once", ONE_OR_MORE] = 256
    store_bytes: Annotated[Size, "bytes per rank for finished rollouts that any rank may train"] = _STORE_BYTES
    reward_timeout_s: Annotated[float, "time limit of a reward function per prompt group, in seconds", POSITIVE] = 60.0
    reward_workers: Annotated[
        int, "threads of a rank for reward functions; 0: the main thread, which stops decoding", _WORKERS
    ] = 4
    skip_failed_rewards: Annotated[bool, "drop completions whose reward fails, instead of ending the run"] = False
    log_completions: Annotated[int, "steps between printed and recorded completions; 0: none", NOT_NEGATIVE] = 0


#: Settings for the weights of old tokens that have no effect.
WEIGHT_CONFLICTS = tuple(
    Conflicts(f"rl.{setting}", applies, {f"rl.{name}": ((getattr(RLConfig, name),), _NO_EFFECT) for name in names})
    for setting, applies, names in (
        ("max_staleness", lambda value: value == 0, _OF_WEIGHTS),
        ("importance_sampling_mode", "clip".__ne__, ("epsilon", "epsilon_high")),
        ("importance_sampling_mode", "none".__eq__, ("importance_sampling_clip_max",)),
    )
)
