"""A model with ordinary parameters, and steps on it in plain torch: what sharded training is compared with.

`Whole` trains on one process without any communication. `bench.fsdp` spreads the same over ranks with FSDP2.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from odc_mpi.data.loader import Batch, Loader, Minibatch
from odc_mpi.train.config import Config, OptimConfig
from odc_mpi.train.inputs import build_model
from odc_mpi.train.optimizer import make_optimizer


def whole_model(config: Config) -> nn.Module:
    """Build the model of a configuration with all its parameters in this process's memory. Local.

    The values are those of a run of the same configuration. Parameters that are tied there are one here.

    Raises:
        UserError: As for a run.
    """
    built = build_model(config.model, config.run.seed)
    module = built.module
    whole = {
        id(old): nn.Parameter(
            built.weights.read(name, 0, old.numel()).view(old.shape).clone(), requires_grad=old.requires_grad
        )
        for name, old in module.named_parameters()
    }
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            setattr(part, name, whole[id(parameter)])
    return module.train()


def whole_optimizer(config: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a run over a module's own parameters. Local.

    Args:
        config: Its settings; the learning rate stays at its peak.
        module: Whose parameters have their whole shapes, as DTensors also have.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return make_optimizer(config, named, {name: tuple(p.shape) for name, p in named})


class Whole:
    """Training without communication: this process runs all microbatches of each minibatch. Local.

    Args:
        config: Of the run.
        loader: A loader of its own, which takes this process for the only one.
    """

    def __init__(self, config: Config, loader: Loader) -> None:
        self._max_norm = config.optim.max_grad_norm
        self._loader = loader
        self._model = whole_model(config)
        self._optimizer = whole_optimizer(config.optim, self._model)

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch. Local.

        Returns:
            Its loss and the tokens that went through the model.
        """
        minibatch = next(self._loader)
        loss = run_microbatches(self._model, minibatch, minibatch)
        if self._max_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, minibatch.num_input_tokens


def run_microbatches(model: nn.Module, minibatch: Minibatch, batches: Iterable[Batch], factor: float = 1.0) -> float:
    """Run forward and backward of some microbatches. Local, if the model is.

    Args:
        model: A Hugging Face causal model.
        minibatch: They are part of; its tokens divide the sum of losses.
        batches: The microbatches.
        factor: Of the gradients.

    Returns:
        Their part of the minibatch's loss.
    """
    total = 0.0
    for batch in batches:
        loss = cast(Any, model)(**batch.inputs).loss * (batch.num_tokens / minibatch.num_tokens)
        (loss * factor).backward()
        total += loss.item()
    return total
