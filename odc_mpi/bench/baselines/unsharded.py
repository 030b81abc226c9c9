"""Baseline in plain PyTorch, which is the reference for sharded training. It uses one process, on the CPU or a GPU."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from odc_mpi.bench.contenders import Contender
from odc_mpi.data.loader import Loader, Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.training.inputs import build_model
from odc_mpi.training.settings import Config
from odc_mpi.training.update import make_optimizer

HOST = torch.device("cpu")


def build_unsharded_model(config: Config, device: torch.device = HOST) -> nn.Module:
    """Build the model of a configuration, unsharded and in fp32. Raises `UserError` if the settings are invalid."""
    meta_model = build_model(config.model, config.run.seed)
    module = meta_model.module
    parameters = {}
    for name, meta in module.named_parameters():
        # A copy, because a random initialization is cached; in fp32, whatever the dtype in files.
        values = meta_model.weights.read(name, 0, meta.numel()).view(meta.shape).to(device, torch.float32, copy=True)
        parameters[id(meta)] = nn.Parameter(values, requires_grad=meta.requires_grad)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            setattr(part, name, parameters[id(parameter)])
    return cast(Any, module).to(device).train()  # moves the buffers, and keeps their dtypes


class UnshardedBaseline(Contender):
    """Contender that trains without communication on all microbatches of `loader`, which no other contender may use.

    `module` is the model to train on `device`, by default that of `build_unsharded_model`.
    """

    def __init__(
        self, config: Config, loader: Loader, device: torch.device = HOST, module: nn.Module | None = None
    ) -> None:
        self._max_norm = config.optim.max_grad_norm
        self._loader = loader
        self._device = device
        module = module or build_unsharded_model(config, device)
        self._token_logps = TokenLogps(module)
        self._model = self._prepare(module)
        trainable = [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        shapes = {name: tuple(parameter.shape) for name, parameter in trainable}
        self._optimizer = make_optimizer(config.optim, trainable, shapes)

    @override
    def step(self) -> tuple[float, int]:
        minibatch = next(self._loader)
        loss = self._run(minibatch)
        if self._max_norm:
            optimized = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
            nn.utils.clip_grad_norm_(optimized, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item(), minibatch.num_input_tokens

    def _prepare(self, model: nn.Module) -> nn.Module:
        return model

    def _run(self, minibatch: Minibatch) -> torch.Tensor:
        return run_microbatches(self._token_logps, minibatch, minibatch, device=self._device)


def run_microbatches(
    token_logps: TokenLogps,
    minibatch: Minibatch,
    microbatches: Iterable[Microbatch],
    factor: float = 1.0,
    device: torch.device = HOST,
) -> torch.Tensor:
    """Run the forward and backward passes of microbatches, and return their contribution to the minibatch's loss.

    The result is a float64 scalar on `device`, which a GPU may not have computed yet. Gradients, but not the result,
    are multiplied by `factor`. If the model is sharded, both passes communicate.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for microbatch in microbatches:
        moved = microbatch.to(device)
        loss = -token_logps(moved.inputs, moved.logit_positions, moved.targets).logps.sum() / minibatch.num_tokens
        (loss * factor).backward()
        total += loss.detach()
    return total
