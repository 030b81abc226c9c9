"""The `rl` section of the settings. Settings that also exist in TRL's `GRPOConfig` have the same names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.training.parsing.setting_types import (
    NON_EMPTY_NAMES,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    POSITIVE,
    Check,
    Size,
    is_objective,
)

_PROBABILITY = Check("above 0 and at most 1", lambda value: 0 < value <= 1)
_TWO_OR_MORE = Check("2 or more", lambda value: value >= 2)
_STORE_BYTES = Size(16 << 20)


@dataclass(frozen=True)
class GRPOConfig:
    """Settings for GRPO: rewards, sampling and loss."""

    reward_funcs: Annotated[
        list[str] | None, "module:name, file.py:name, a built-in, or a reward model; docs/rewards.md", NON_EMPTY_NAMES
    ] = None
    reward_weights: Annotated[list[float] | None, "weight of each reward function; null: 1.0 each"] = None
    tokenizer: Annotated[str | None, "tokenizer: directory, hub name, run or data set; null: model.path"] = None
    num_generations: Annotated[int, "completions per prompt", _TWO_OR_MORE] = 8
    max_completion_length: Annotated[int, "most tokens of a completion", ONE_OR_MORE] = 512
    temperature: Annotated[float, "temperature of the softmax, in sampling and in training", POSITIVE] = 1.0
    top_p: Annotated[float, "nucleus sampling threshold; 1: off", _PROBABILITY] = 1.0
    top_k: Annotated[int, "sample from the k most likely tokens; 0: off", NOT_NEGATIVE] = 0
    beta: Annotated[float, "weight of the KL divergence from model.path; 0: none", NOT_NEGATIVE] = 0.0
    loss_type: Annotated[
        Literal["dapo", "grpo", "dr_grpo"], "divide by tokens, by completions and their lengths, or by a constant"
    ] = "dapo"
    scale_rewards: Annotated[Literal["group", "none"], "divide advantages by the std of the group"] = "group"
    mask_truncated_completions: Annotated[bool, "exclude truncated completions from the loss"] = False
    num_iterations: Annotated[int, "updates per rollout: 1, as training is strictly on-policy", ONE_OR_MORE] = 1
    max_concurrent_sequences: Annotated[int, "most completions that a rank decodes at once", ONE_OR_MORE] = 256
    store_bytes: Annotated[Size, "bytes per rank for finished rollouts that any rank may train"] = _STORE_BYTES
    reward_timeout_s: Annotated[float, "time limit of a reward function per prompt group, in seconds", POSITIVE] = 60.0
    skip_failed_rewards: Annotated[bool, "drop completions whose reward fails, instead of ending the run"] = False
    log_completions: Annotated[int, "steps between printed and recorded completions; 0: none", NOT_NEGATIVE] = 0


_UNKNOWN_LENGTHS = "ranks claim prompts and rollouts, whose lengths are not known in advance"
#: Settings, each with the only value that GRPO supports and the reason.
_REQUIRED = {
    "rl.num_iterations": (1, "training is strictly on-policy; after an update the rollouts are from an older policy"),
    "lora.dropout": (0, "with dropout the trained policy is not the one that generated"),
    "run.keep_best": (False, "there is no evaluation loss"),
    "data.balance": ("lb_mini", _UNKNOWN_LENGTHS),
    "data.cost": ("flops", _UNKNOWN_LENGTHS),
    "data.context_parallel": ("off", _UNKNOWN_LENGTHS),
}


def check_rl(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if the GRPO settings in `values` are incomplete or contradictory. The error names `source`."""
    if not is_objective("grpo", "rl", GRPOConfig, _REQUIRED, values, source):
        return
    functions, weights = values.get("rl.reward_funcs"), values.get("rl.reward_weights")
    if not functions:
        raise UserError(f"{source}: run.objective grpo requires rl.reward_funcs: set it, for example to exact_match")
    if weights is not None and len(weights) != len(functions):
        raise UserError(
            f"{source}: rl.reward_weights: expected {len(functions)}, a weight for each of rl.reward_funcs, got "
            f"{len(weights)}"
        )
    if not (values.get("rl.tokenizer") or values.get("model.path")):
        raise UserError(f"{source}: run.objective grpo requires a tokenizer: set rl.tokenizer, or model.path")
    num_generations = values.get("rl.num_generations", GRPOConfig.num_generations)
    sequences = values.get("data.minibatch_sequences", 16)
    if sequences % num_generations:
        raise UserError(
            f"{source}: data.minibatch_sequences: expected a multiple of rl.num_generations, {num_generations}, got "
            f"{sequences}: with run.objective grpo it is the number of completions per step"
        )
