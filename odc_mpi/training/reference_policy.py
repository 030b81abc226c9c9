"""The reference policy of an objective, available in each step: the model before the training, or a teacher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from odc_mpi.api import shard_model
from odc_mpi.models.build import MetaModel
from odc_mpi.models.token_logps import TokenLogps, TokenScores
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import build_model

#: Function with the arguments and the result of a `TokenLogps` of the reference policy, but without gradients.
ReferenceFn = Callable[..., TokenScores]


def reference_policy(context: RunContext) -> ReferenceFn:
    """Return a one-sided function that computes log-probabilities under the reference policy. Collective.

    The reference policy is the model with adapters disabled or, without adapters, a frozen copy of the initial model.
    """
    config, module = context.config, context.model.module
    if config.lora.r is None:
        meta_model = context.world.run_on_all(lambda: build_model(config.model, config.run.seed))
        return frozen_policy(context, meta_model)
    token_logps = TokenLogps(module)

    def score(*args: Any) -> TokenScores:
        with adapters_disabled(module), torch.no_grad():
            return token_logps(*args)

    return score


def frozen_policy(context: RunContext, meta_model: MetaModel) -> ReferenceFn:
    """Shard `meta_model` beside the model. Return a one-sided function like that of `reference_policy`. Collective."""
    config = context.config
    meta_model.module.requires_grad_(False)
    policy = shard_model(
        meta_model.module,
        context.world,
        param_dtype=None if meta_model.adapter else getattr(torch, config.model.param_dtype),
        weights=meta_model.weights,
        comm=replace(context.decision, settings=replace(context.decision.settings, gradient_cache_bytes=0)),
        device=config.run.device,
    ).eval()
    context.model.close_first(policy)
    return torch.no_grad()(TokenLogps(policy.module).__call__)


@contextmanager
def adapters_disabled(module: Any) -> Iterator[None]:
    """Context manager that disables a model's adapters. Unlike peft's, it does not change `requires_grad`."""
    layers = [layer for layer in module.modules() if hasattr(layer, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was
