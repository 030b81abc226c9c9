"""Scores that a reward model assigns to tokens."""

from collections.abc import Mapping
from typing import Any

import torch

from odc_mpi.models.heads.task import REWARD
from odc_mpi.models.logps.logit_transform import replaced_forwards


class RewardScores:
    """Callable that scores tokens with a reward model. `module` is the model, or the `module` of a sharded model."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._head = getattr(module, str(REWARD.new_head))

    def __call__(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> torch.Tensor:
        """Run the model and return the scores, `[K]`, in the dtype of the model. One-sided if the model is sharded.

        `inputs` are the model's keyword arguments. `positions`, int64 `[K]`, selects tokens in the flattened batch.
        """
        score, scores = self._head.forward, []

        def head(hidden: torch.Tensor) -> torch.Tensor:
            scores.append(score(hidden.flatten(0, -2)[positions])[:, 0])
            return hidden.new_zeros(*hidden.shape[:-1], 1)  # the model selects one per row; its output is not used

        with replaced_forwards({self._head: head}):
            self._module(**inputs)
        (result,) = scores
        return result
