"""The policy at the start of a run, from which `rl.beta` keeps the trained one: without adapters, or a frozen copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from odc_mpi.api import shard_model
from odc_mpi.probe.decision import Decision
from odc_mpi.rollout.groups import RolloutMicrobatch
from odc_mpi.rollout.logps import token_logps
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.inputs import build_model
from odc_mpi.training.objectives.grpo import ReferenceLogpsFn
from odc_mpi.training.settings import Config


def make_reference_logps(config: Config, world: World, model: ShardedModel, decision: Decision) -> ReferenceLogpsFn:
    """Make the function of a microbatch that returns its log-probabilities, one-sided. Collective.

    Args:
        config: Of the run.
        world: The ranks.
        model: Before its first step. Its adapters are switched off in the forwards of the reference; without adapters
            the reference is a copy, which takes as much memory again.
        decision: How ranks reach each other.
    """
    has_adapters = config.lora.r is not None
    policy = model if has_adapters else _frozen_copy(config, world, decision)

    def logps(microbatch: RolloutMicrobatch) -> torch.Tensor:
        off: AbstractContextManager[None] = adapters_disabled(policy.module) if has_adapters else nullcontext()
        with off, torch.no_grad():
            logit_positions, targets = (
                microbatch.logit_positions.to(policy.device),
                microbatch.targets.to(policy.device),
            )
            return token_logps(policy.module, microbatch.inputs, logit_positions, targets, config.rl.temperature)

    return logps


def _frozen_copy(config: Config, world: World, decision: Decision) -> ShardedModel:
    meta_model = world.run_on_all(lambda: build_model(config.model, config.run.seed))
    meta_model.module.requires_grad_(False)
    return shard_model(
        meta_model.module,
        world,
        param_dtype=getattr(torch, config.model.param_dtype),
        prefetch=config.comm.prefetch,
        weights=meta_model.weights,
        decision=decision,
        parameter_cache_bytes=config.comm.parameter_cache_bytes,
        gradient_cache_bytes=0,
        device=config.run.device,
    ).eval()


@contextmanager
def adapters_disabled(module: Any) -> Iterator[None]:
    """Switch the adapters in a model off in the enclosed code.

    Not by peft's `disable_adapter`, which changes what is trained.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was
