"""Settings sections `dpo` and `reward`, with the names and defaults of TRL's `DPOConfig` and `RewardConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean
from odc_mpi.training.parsing.setting_types import NON_EMPTY_NAMES, NOT_NEGATIVE, POSITIVE, Check, is_objective

#: Losses for a pair; see `training.objectives.dpo`.
LossType = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sigmoid_norm", "sft"]
#: Settings, each with the only value that objectives for pairs support, and the reason.
PAIR_REQUIREMENTS = {
    "data.context_parallel": ("off", "a pair cannot be split over ranks"),
    "lora.dropout": (0, "dropout would change what is compared"),
}
_BELOW_HALF = Check("0 or more and below 0.5", lambda value: 0 <= value < 0.5)


@dataclass(frozen=True)
class DPOConfig:
    """Settings for direct preference optimization."""

    beta: Annotated[float, "scale of the log-ratios to the reference model", POSITIVE] = 0.1
    loss_type: Annotated[LossType | list[str], "loss, or several; docs/preferences.md", NON_EMPTY_NAMES] = "sigmoid"
    loss_weights: Annotated[list[float] | None, "weight of each loss; null: 1.0 each"] = None
    label_smoothing: Annotated[float, "sigmoid and robust: probability of swapped answers", _BELOW_HALF] = 0.0

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """Names of the losses in `loss_type`, each with its weight."""
        names = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        return list(zip(names, self.loss_weights or [1.0] * len(names), strict=True))


@dataclass(frozen=True)
class RewardConfig:
    """Settings for reward models."""

    center_rewards_coefficient: Annotated[
        float | None, "factor of a loss that centers rewards, such as 0.01; null: none", NOT_NEGATIVE
    ] = None


def check_dpo(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if a DPO setting in `values` contradicts another setting. The error names `source`."""
    if not is_objective("dpo", "dpo", DPOConfig, PAIR_REQUIREMENTS, values, source):
        return
    types, weights = values.get("dpo.loss_type", "sigmoid"), values.get("dpo.loss_weights")
    types, known = [types] if isinstance(types, str) else types, get_args(LossType)
    for name in types:
        if name not in known:
            raise UserError(
                f"{source}: dpo.loss_type: expected some of {', '.join(known)}, got {name}{did_you_mean(name, known)}"
            )
    if weights is not None and (len(weights) != len(types) or min(weights) < 0 or not any(weights)):
        raise UserError(
            f"{source}: dpo.loss_weights: expected {len(types)} weights, one for each loss in dpo.loss_type, none "
            f"below 0 and not all 0, got {weights}"
        )
    if values.get("dpo.label_smoothing") and not {"sigmoid", "robust"} & set(types):
        raise UserError(
            f"{source}: dpo.label_smoothing: expected 0 without the losses sigmoid and robust in dpo.loss_type, got "
            f"{values['dpo.label_smoothing']}"
        )


def check_reward(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if the reward settings in `values` contradict other settings. The message names `source`."""
    is_objective("reward", "reward", RewardConfig, PAIR_REQUIREMENTS, values, source)
