"""The optimizer of a configuration and its learning rate. Local."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from odc_mpi.shard.optim import build_optimizer, schedule_factor
from odc_mpi.train.settings import Config, OptimConfig


def make_optimizer(
    config: OptimConfig, named: Iterable[tuple[str, torch.nn.Parameter]], shapes: Mapping[str, Sequence[int]]
) -> torch.optim.Optimizer:
    """Make the optimizer that a configuration names. Local.

    Args:
        config: Its settings; the learning rate is the peak.
        named: Parameters by dotted name, or this rank's slices of them.
        shapes: Whole shapes by dotted name.
    """
    settings: dict[str, dict[str, Any]] = {
        "adamw": {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon},
        "sgd": {"momentum": config.momentum},
    }
    return build_optimizer(
        config.optimizer,
        named,
        shapes,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused={"auto": None, "on": True, "off": False}[config.fused],
        **settings[config.optimizer],
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
    """Set the learning rate of a step, and return it. Local.

    Args:
        optimizer: All its groups get the same.
        config: Names the peak, the warm-up and the shape, and how many steps there are.
        step: From 0.
    """
    optim = config.optim
    factor = schedule_factor(optim.lr_scheduler_type, step, optim.warmup_steps, config.run.steps)
    for group in optimizer.param_groups:
        group["lr"] = optim.learning_rate * factor
    return optim.learning_rate * factor
