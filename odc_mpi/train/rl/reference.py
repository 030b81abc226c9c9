"""The policy at the start of a run, from which `rl.beta` keeps the trained one: without adapters, or a frozen copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from odc_mpi.rollout.groups import RolloutBatch
from odc_mpi.rollout.logps import token_logps
from odc_mpi.shard.model import ShardedModel


class ReferencePolicy:
    """Log-probabilities of tokens under a policy that is not trained.

    Args:
        model: The trained model, whose adapters are switched off meanwhile; or a frozen copy of what it was.
        temperature: What logits are divided by.
        adapters: Whether there are adapters to switch off.
    """

    def __init__(self, model: ShardedModel, temperature: float, *, adapters: bool) -> None:
        self._model, self._temperature, self._adapters = model, temperature, adapters

    def __call__(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the log-probabilities of a microbatch's tokens, float32 [K]. One-sided."""
        device, module = self._model.device, self._model.module
        off: AbstractContextManager[None] = without_adapters(module) if self._adapters else nullcontext()
        with off, torch.no_grad():
            places, targets = batch.places.to(device), batch.targets.to(device)
            return token_logps(module, batch.inputs, places, targets, self._temperature)


@contextmanager
def without_adapters(module: Any) -> Iterator[None]:
    """Switch the adapters in a model off in the enclosed code. Local.

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
