"""Reference policy for `rl.beta`, the policy at the start of the run: the model without adapters, or a frozen copy."""

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
    """Make the function that computes the log-probabilities of a microbatch with one-sided fetches. Collective.

    With adapters, the reference is the model with its adapters switched off. Without, it is a frozen copy of the
    initial model, which needs the memory of a second model.
    """
    has_adapters = config.lora.r is not None
    policy = model if has_adapters else _frozen_copy(config, world, decision)

    def logps(microbatch: RolloutMicrobatch) -> torch.Tensor:
        off: AbstractContextManager[None] = adapters_disabled(policy.module) if has_adapters else nullcontext()
        with off, torch.no_grad():
            positions, targets = (each.to(policy.device) for each in (microbatch.logit_positions, microbatch.targets))
            return token_logps(policy.module, microbatch.inputs, positions, targets, config.rl.temperature)

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
    """Switch the adapters of a model off in the context.

    Unlike `disable_adapter` of peft, it does not change `requires_grad`.
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
