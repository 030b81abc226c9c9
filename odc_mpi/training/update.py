"""Parameter update: gradient clipping and the optimizer step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.optim import build_optimizer, schedule_factor
from odc_mpi.training.settings import Config, OptimConfig


class Update(Callback):
    """Updates this rank's parameter shards, unless a gradient on any rank is not finite."""

    columns: ClassVar = (
        ProgressColumn("grad norm", 9, "{grad_norm:.4g}"),
        ProgressColumn("lr", 8, "{learning_rate:.2e}"),
    )
    summary: ClassVar = {"skipped_steps": SummaryField("skipped", "sum")}

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._model, self.optimizer, self._config = model, optimizer, config

    def on_step_begin(self, step: Step) -> None:
        """Set the learning rate for this step, and add it to the metrics."""
        optim, steps = self._config.optim, self._config.run.steps
        kind, warmup_steps = optim.lr_scheduler_type, optim.warmup_steps or math.ceil(optim.warmup_ratio * steps)
        factor = schedule_factor(kind, step.number - 1, warmup_steps, steps, optim.min_lr_ratio, optim.decay_ratio)
        rate = cast(float, optim.learning_rate) * factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        step.metrics["learning_rate"] = rate

    def run(self, step: Step, loss_normalizer: float, *, finite: bool) -> None:
        """Divide gradients by `loss_normalizer`, clip them and run the optimizer. Collective if gradients are clipped.

        The optimizer step is skipped unless the gradients are finite on all ranks (`finite`) and their norm is finite.
        """
        self._model.divide_gradients_(loss_normalizer)
        max_norm = self._config.optim.max_grad_norm
        # An island that trains separately has only its share of the gradient of the minibatch.
        share = step.minibatch.island_share or 1.0
        if max_norm:
            self._model.clip_grad_norm_(max_norm * share)
        self._model.divide_gradients_(share)
        norm = sum(self._model.replica_norms) if max_norm else None  # before clipping, a mean over separate islands
        finite = finite and (norm is None or math.isfinite(norm))
        if finite:
            with self._model.spans.span("optimize"):
                self.optimizer.step()
        step.metrics |= {"grad_norm": norm, "skipped": not finite}


def make_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
    *,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the settings select, for parameters or for this rank's shards of them.

    For `shapes` and `fused`, see `build_optimizer`. Parameters with fewer than two dimensions have no weight decay.
    """
    settings: dict[str, dict[str, Any]] = {
        "adamw": {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon},
        "sgd": {"momentum": config.momentum},
    }
    return build_optimizer(
        config.optimizer,
        named_parameters,
        shapes,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused=fused,
        **settings[config.optimizer],
    )
