"""Section `reward` of the settings. They have the names and defaults of `RewardConfig` of TRL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from odc_mpi.training.dpo.settings import PAIR_REQUIREMENTS
from odc_mpi.training.setting_types import NOT_NEGATIVE, is_objective


@dataclass(frozen=True)
class RewardConfig:
    """Settings of reward models."""

    center_rewards_coefficient: Annotated[
        float | None, "factor of a loss that centers rewards, such as 0.01; null: none", NOT_NEGATIVE
    ] = None


def check_reward(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if the user's settings of reward models, given in `source`, are contradictory."""
    is_objective("reward", "reward", RewardConfig, PAIR_REQUIREMENTS, values, source)
