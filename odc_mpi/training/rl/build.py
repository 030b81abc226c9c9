"""Functions that build the parts of a GRPO run: minibatch source, objective, callbacks and reference policy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from odc_mpi.api import shard_model
from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import warn
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Callback
from odc_mpi.probe.decision import Decision
from odc_mpi.rollout.rewards import check_arguments, compute_rewards, load_reward_functions
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import build_model
from odc_mpi.training.objectives.grpo import GRPOObjective, ReferenceLogpsFn
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.rl.evaluation import RewardEvaluator
from odc_mpi.training.rl.prompts import PromptLoader
from odc_mpi.training.rl.source import RolloutSource
from odc_mpi.training.settings import Config


def build_grpo(context: RunContext, model: ShardedModel) -> Parts:
    """Build the minibatch source, the objective and the other callbacks for a GRPO run. Collective."""
    config, world, inputs = context.config, context.world, context.inputs
    rl = config.rl
    assert isinstance(inputs.loader, PromptLoader) and isinstance(inputs.dataset, PromptDataset) and rl.reward_funcs
    arguments = rl.reward_funcs, rl.reward_weights, model.device, inputs.prompt_time
    functions = world.run_on_all(lambda: load_reward_functions(*arguments))
    rewards_of = partial(
        compute_rewards, functions, rank=world.rank, timeout_s=rl.reward_timeout_s, skip=rl.skip_failed_rewards
    )
    world.run_on_all(lambda: check_arguments(functions, inputs.datasets))
    names = [function.name for function in functions]
    for setting, prompts in inputs.datasets.items() if world.rank == 0 else ():
        assert isinstance(prompts, PromptDataset)
        for ignored, count in prompts.ignored.items():
            warn(f"WARNING: {setting}: {ignored} is ignored in {count:,} of {len(prompts):,} prompts")
    if world.rank == 0 and (rl.top_p < 1 or rl.top_k):
        warn(
            f"WARNING: rl.top_p {rl.top_p:g} and rl.top_k {rl.top_k}: completions are sampled from a truncated "
            "distribution, so training is not strictly on-policy"
        )
    model.eval()  # with dropout, the trained policy would differ from the one that generates
    reference_logps = make_reference_logps(config, world, model, context.decision) if rl.beta else None
    packs = inputs.model.packing.packs
    source = RolloutSource(config, world, model, inputs.dataset, inputs.loader, names, rewards_of, packs)
    callbacks: list[Callback] = []
    if isinstance(inputs.evaluation, PromptDataset):
        callbacks.append(RewardEvaluator(config, world, model, inputs.evaluation, rewards_of))
    num_groups = config.data.minibatch_sequences // rl.num_generations
    return Parts(GRPOObjective(model.module, rl, num_groups, reference_logps), callbacks, source)


def make_reference_logps(config: Config, world: World, model: ShardedModel, decision: Decision) -> ReferenceLogpsFn:
    """Return a one-sided function that computes log-probabilities under the reference policy. Collective.

    The reference policy is the model with adapters disabled or, without adapters, a frozen copy of the initial model.
    """
    has_adapters = config.lora.r is not None
    policy = model if has_adapters else _frozen_copy(config, world, decision)
    token_logps = TokenLogps(policy.module)

    def logps(microbatch: GroupMicrobatch) -> torch.Tensor:
        off: AbstractContextManager[None] = adapters_disabled(policy.module) if has_adapters else nullcontext()
        with off, torch.no_grad():
            return token_logps(
                microbatch.inputs, microbatch.logit_positions, microbatch.targets, config.rl.temperature
            ).logps

    return logps


def _frozen_copy(config: Config, world: World, decision: Decision) -> ShardedModel:
    meta_model = world.run_on_all(lambda: build_model(config.model, config.run.seed))
    meta_model.module.requires_grad_(False)
    return shard_model(
        meta_model.module,
        world,
        param_dtype=getattr(torch, config.model.param_dtype),
        weights=meta_model.weights,
        comm=replace(decision, settings=replace(decision.settings, gradient_cache_bytes=0)),
        device=config.run.device,
    ).eval()


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
