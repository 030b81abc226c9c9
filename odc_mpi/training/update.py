"""Parameter update: gradient clipping, learning rate schedules and the optimizer step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import SGD, AdamW

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.settings import Config, OptimConfig


class Update(Callback):
    """Updates this rank's parameter shards, unless a gradient on any rank is not finite."""

    metrics = (
        Metric("grad_norm", "norm before clipping, null without clipping", form="{:.4g}", column=("grad norm", 9)),
        Metric("learning_rate", "learning rate of the step", form="{:.2e}", column=("lr", 8)),
        Metric("skipped", "skipped steps", RESULT, "sum", summary_key="skipped_steps"),
    )

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
        norm = self._model.clip_grad_norm_(max_norm) if max_norm else None
        finite = finite and (norm is None or math.isfinite(norm))
        if finite:
            with self._model.spans.span("optimize"):
                self.optimizer.step()
        step.metrics |= {"grad_norm": norm, "skipped": not finite}


def schedule_factor(
    kind: str, step: int, warmup_steps: int, steps: int, min_ratio: float = 0.0, decay_ratio: float = 1.0
) -> float:
    """Return the learning rate for `step`, counted from 0, as a fraction of the peak learning rate.

    The learning rate rises linearly during the first `warmup_steps` steps and reaches its peak in the next step. If
    `kind` is "constant", it then stays at the peak. If it is "linear" or "cosine", the learning rate then falls and
    would reach `min_ratio` at step `steps`. If it is "warmup_stable_decay", the learning rate falls to `min_ratio` like
    a cosine in the last `decay_ratio * steps` steps, as in `transformers.get_wsd_schedule`. `steps` includes warmup.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    first = warmup_steps
    if kind == "warmup_stable_decay":
        first = max(warmup_steps, steps - math.ceil(decay_ratio * steps))
    decay_progress = min(1.0, max(0, step - first) / max(1, steps - first))
    cosine = 0.5 * (1.0 + math.cos(math.pi * decay_progress))
    shapes = {"linear": 1.0 - decay_progress, "cosine": cosine, "constant": 1.0, "warmup_stable_decay": cosine}
    return min_ratio + (1.0 - min_ratio) * shapes[kind]


def make_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
    *,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the settings select, for parameters or for this rank's slices of them.

    Args:
        named_parameters: Pairs of a parameter's dotted name and the parameter or this rank's slice of it.
        shapes: Full shapes of the parameters, keyed by dotted name. A slice itself has only one dimension. Parameters
            with fewer than two dimensions, such as biases and norm weights, have no weight decay.
        fused: True to use PyTorch's fused kernel. None means True for "adamw" and False for "sgd".
    """
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in named_parameters:
        (decayed if len(shapes[name]) >= 2 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (AdamW, {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}),
        "sgd": (SGD, {"momentum": config.momentum}),
    }
    kind, settings = kinds[config.optimizer]
    if fused is None:
        # PyTorch's default takes three times as long on a CPU, and needs parameter-sized temporaries on a GPU.
        fused = config.optimizer == "adamw"
    return kind([g for g in groups if g["params"]], lr=config.learning_rate, fused=fused or None, **settings)
