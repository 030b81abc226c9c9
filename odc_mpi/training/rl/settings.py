"""The section `rl` of the settings: names and defaults of TRL's `GRPOConfig`, where it has them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.training.setting_types import NON_EMPTY_NAMES, NOT_NEGATIVE, ONE_OR_MORE, POSITIVE, Check, Size

_PROBABILITY = Check("above 0 and at most 1", lambda value: 0 < value <= 1)
_TWO_OR_MORE = Check("2 or more", lambda value: value >= 2)


_STORE_BYTES = Size(16 << 20)


@dataclass(frozen=True)
class GRPOConfig:
    """Rewards, how completions are generated, and what is made of both."""

    reward_funcs: Annotated[
        list[str] | None, "package.module:name, file.py:name or a built-in; docs/rewards.md", NON_EMPTY_NAMES
    ] = None
    reward_weights: Annotated[list[float] | None, "weight of each of them; null: 1.0 each"] = None
    tokenizer: Annotated[str | None, "of the prompts: a directory or a data set; null: that of model.path"] = None
    num_generations: Annotated[int, "completions of a prompt", _TWO_OR_MORE] = 8
    max_completion_length: Annotated[int, "the most tokens of a completion", ONE_OR_MORE] = 512
    temperature: Annotated[float, "of the softmax, in sampling and in training", POSITIVE] = 1.0
    top_p: Annotated[float, "sampling: the most likely tokens of so much probability; 1: all", _PROBABILITY] = 1.0
    top_k: Annotated[int, "sampling: so many of the most likely tokens; 0: all", NOT_NEGATIVE] = 0
    beta: Annotated[float, "weight of the KL divergence from the policy at the start; 0: none", NOT_NEGATIVE] = 0.0
    loss_type: Annotated[
        Literal["dapo", "grpo", "dr_grpo"], "divide by tokens, by completions and their lengths, or by a constant"
    ] = "dapo"
    scale_rewards: Annotated[Literal["group", "none"], "divide advantages by the deviation within a prompt group"] = (
        "group"
    )
    mask_truncated_completions: Annotated[bool, "learn nothing from completions that were cut at their end"] = False
    num_iterations: Annotated[int, "updates for each rollout: 1, as training is strictly on-policy", ONE_OR_MORE] = 1
    max_concurrent_sequences: Annotated[int, "completions that a rank decodes at once, at most", ONE_OR_MORE] = 256
    store_bytes: Annotated[Size, "memory of a rank for finished rollouts that wait for a free rank"] = _STORE_BYTES
    reward_timeout_s: Annotated[float, "seconds that a reward function may take for a prompt group", POSITIVE] = 60.0
    skip_failed_rewards: Annotated[bool, "leave completions out whose reward fails, instead of ending the run"] = False
    log_completions: Annotated[int, "steps between completions that are shown and written; 0: none", NOT_NEGATIVE] = 0


def check_rl(values: Mapping[str, Any], source: str) -> None:
    """Check settings against each other that rewards have to do with.

    Args:
        values: Given values, by the names of settings.
        source: Of the settings, for messages.

    Raises:
        UserError: They do not fit together.
    """
    if values.get("run.objective", "sft") != "grpo":
        defaults = {f"rl.{item.name}": item.default for item in fields(GRPOConfig)}
        changed = [key for key in values if key in defaults and values[key] != defaults[key]]
        if changed:
            raise UserError(f"{source}: {changed[0]} goes with run.objective grpo: set run.objective, or leave it out")
        return
    functions, weights = values.get("rl.reward_funcs"), values.get("rl.reward_weights")
    if not functions:
        raise UserError(
            f"{source}: run.objective grpo learns from rewards: expected rl.reward_funcs, such as exact_match, got none"
        )
    if weights is not None and len(weights) != len(functions):
        raise UserError(
            f"{source}: rl.reward_weights: expected a weight for each of rl.reward_funcs, {len(functions)}, got "
            f"{len(weights)}"
        )
    if not (values.get("rl.tokenizer") or values.get("model.path")):
        raise UserError(
            f"{source}: rl.tokenizer: expected the tokenizer of the prompts here or in model.path, got none"
        )
    _check_on_policy(values, source)
    _check_sizes(values, source)


def _check_on_policy(values: Mapping[str, Any], source: str) -> None:
    """Refuse what would make rollouts differ from what is trained."""
    if values.get("rl.num_iterations", 1) > 1:
        raise UserError(
            f"{source}: rl.num_iterations: expected 1, got {values['rl.num_iterations']}: after the first update "
            "rollouts are another policy's, and training here is strictly on-policy"
        )
    if values.get("lora.dropout"):
        raise UserError(
            f"{source}: lora.dropout: expected 0 under run.objective grpo, got {values['lora.dropout']}: with dropout "
            "the trained policy is not the one that generated"
        )


def _check_sizes(values: Mapping[str, Any], source: str) -> None:
    num_generations = values.get("rl.num_generations", GRPOConfig.num_generations)
    sequences = values.get("data.minibatch_sequences", 16)
    if sequences % num_generations:
        raise UserError(
            f"{source}: data.minibatch_sequences counts completions: expected a multiple of rl.num_generations, "
            f"{num_generations}, got {sequences}"
        )
    for key, why in (
        ("run.keep_best", "compares evaluation losses, which run.objective grpo has none of"),
        ("run.num_train_epochs", "counts passes over data: give run.steps under run.objective grpo"),
    ):
        if values.get(key):
            raise UserError(f"{source}: {key} {why}: leave it out")
    for key, default in (("data.balance", "lb_mini"), ("data.cost", "flops"), ("data.context_parallel", "off")):
        if values.get(key, default) != default:
            raise UserError(
                f"{source}: {key} deals out sequences of known lengths: leave it out under run.objective grpo, where "
                "free ranks draw prompts and finished rollouts"
            )
