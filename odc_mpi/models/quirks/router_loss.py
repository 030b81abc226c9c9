"""Coefficient of the auxiliary router loss of mixtures of experts, which JetMoE has under a name of its own."""

from typing import Any

import torch

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def scaled_router_loss(module: Any, output: Any) -> torch.Tensor | None:
    """Return the auxiliary router loss in a model's output, multiplied by its coefficient. None if there is none."""
    loss: torch.Tensor | None = getattr(output, "aux_loss", None)
    if loss is None:
        return None
    return loss * float(next(getattr(module, name) for name in _COEFFICIENTS if hasattr(module, name)))
