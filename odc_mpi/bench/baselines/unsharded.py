"""A model with ordinary parameters, and steps on it in plain torch: what sharded training is compared with.

`UnshardedBaseline` trains on one process without any communication, on the host or on a GPU. `bench.baselines.fsdp` spreads the
same over ranks with FSDP2.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from odc_mpi.data.loader import Loader, Microbatch, Minibatch
from odc_mpi.training.inputs import build_model
from odc_mpi.training.settings import Config
from odc_mpi.training.update import make_optimizer

HOST = torch.device("cpu")


def build_unsharded_model(config: Config, device: torch.device = HOST) -> nn.Module:
    """Build the model of a configuration with all its parameters in fp32 in this process's memory.

    The values are those of a run of the same configuration. Parameters that are tied there are one here.

    Raises:
        UserError: As for a run.
    """
    meta_model = build_model(config.model, config.run.seed)
    module = meta_model.module
    whole = {}
    for name, old in module.named_parameters():
        # A copy, since a draw is kept; in fp32, whatever files hold.
        values = meta_model.weights.read(name, 0, old.numel()).view(old.shape).to(device, torch.float32, copy=True)
        whole[id(old)] = nn.Parameter(values, requires_grad=old.requires_grad)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            setattr(part, name, whole[id(parameter)])
    return cast(Any, module).to(device).train()  # buffers, which stay of the type that they are of


class UnshardedBaseline:
    """Training without communication: this process runs its microbatches of each minibatch.

    Args:
        config: Of the run; the learning rate stays at its peak.
        loader: A loader of its own.
        device: Where it computes and optimizes.
    """

    def __init__(self, config: Config, loader: Loader, device: torch.device = HOST) -> None:
        self._max_norm = config.optim.max_grad_norm
        self._loader = loader
        self._device = device
        self._model = self._prepare(build_unsharded_model(config, device))
        named_parameters = [
            (name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad
        ]
        self._optimizer = make_optimizer(
            config.optim, named_parameters, {name: tuple(p.shape) for name, p in named_parameters}
        )

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch. Local; the device may still work on the end of it.

        Returns:
            This process's part of its loss, and the tokens of all ranks that went through the model.
        """
        minibatch = next(self._loader)
        loss = self._run(minibatch)
        if self._max_norm:
            optimized = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
            nn.utils.clip_grad_norm_(optimized, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, minibatch.num_input_tokens

    def _prepare(self, model: nn.Module) -> nn.Module:
        return model

    def _run(self, minibatch: Minibatch) -> float:
        """Run forward and backward of this process's microbatches; return their part of the loss."""
        return run_microbatches(self._model, minibatch, minibatch, device=self._device)


def run_microbatches(
    model: Callable[..., Any],
    minibatch: Minibatch,
    batches: Iterable[Microbatch],
    factor: float = 1.0,
    device: torch.device = HOST,
) -> float:
    """Run forward and backward of some microbatches. Local, if the model is.

    Args:
        model: A Hugging Face causal model.
        minibatch: They are part of; its tokens divide the sum of losses.
        batches: The microbatches.
        factor: Of the gradients.
        device: Where the model is.

    Returns:
        Their part of the minibatch's loss.
    """
    total = 0.0
    for batch in batches:
        loss = model(**batch.to(device).inputs).loss * (batch.num_tokens / minibatch.num_tokens)
        (loss * factor).backward()
        total += loss.item()
    return total
