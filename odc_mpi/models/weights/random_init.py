"""Random initialization of transformers models, one module at a time, so that no rank needs the full model."""

import copy
import hashlib

import torch
import transformers
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.models.adapters.check import HashedWeights


class RandomInitWeights(HashedWeights):
    """Source of randomly initialized parameters. The model's `_init_weights` is called separately for each module.

    Changes that `_init_weights` makes to submodules of its argument, such as the depth-dependent scaling of residual
    projections in GPT-2, are lost. A module's values depend only on `seed` and the module's name, not on the number of
    ranks or the order in which parameters are read. The most recently initialized module is cached. `module`
    must be on the meta device. `read` raises `UserError` if `_init_weights` does not initialize the parameter.
    """

    def __init__(self, module: transformers.PreTrainedModel, seed: int) -> None:
        self._model = module
        # A copy, as sharding replaces the parameters of the module by placeholders. Meta tensors cost no memory.
        self._modules = dict(copy.deepcopy(module).named_modules())
        self._seed = seed
        self._initialized: tuple[str, nn.Module] | None = None  # parameters of a module are read consecutively

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        if self._initialized is None or self._initialized[0] != owner:
            self._initialized = owner, self._init_module(owner)
        parameter = self._initialized[1]._parameters[key]
        assert parameter is not None
        part = parameter.detach().view(-1)[start:stop]
        if part.isnan().any():
            raise UserError(f"model.config: {type(self._model).__name__} does not initialize {name}: use model.path")
        return part

    @override
    def parts(self) -> list[str]:
        return [name for name, _ in self._modules[""].named_parameters()]

    @override
    def digest(self, part: str) -> str:
        parameter = self.read(part, 0, self._modules[""].get_parameter(part).numel())
        return hashlib.sha256(parameter.contiguous().numpy().tobytes()).hexdigest()

    def init_buffers(self) -> None:
        """Allocate and initialize the model's buffers, such as rotary frequencies, in host memory."""
        for name, submodule in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in submodule._buffers.values()):
                initialized = self._init_module(name)
                submodule._buffers.update(initialized._buffers)
                # Some modules keep a second reference to a buffer in an attribute of another name.
                submodule.__dict__.update(
                    {k: v for k, v in initialized.__dict__.items() if isinstance(v, torch.Tensor)}
                )
        if uninitialized_buffers(self._model):
            # Some models initialize buffers in a call for the enclosing module. Parameters remain on the meta device.
            with torch.random.fork_rng(devices=[]):
                for submodule in self._model.modules():
                    if not submodule._parameters and not submodule._buffers:
                        self._model._init_weights(submodule)

    @torch.no_grad()
    def _init_module(self, name: str) -> nn.Module:
        module = copy.copy(self._modules[name])
        model_name = name  # of the innermost model, as transformers initializes its modules
        while not isinstance(model := self._modules[model_name], transformers.PreTrainedModel):
            model_name = model_name.rpartition(".")[0]
        module._parameters = {
            key: None if parameter is None else nn.Parameter(_undefined(parameter), parameter.requires_grad)
            for key, parameter in module._parameters.items()
        }
        module._buffers = {
            key: _undefined(buffer) if buffer is not None and buffer.is_meta else buffer
            for key, buffer in module._buffers.items()
        }
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            # Weights are initialized on the CPU. `torch.manual_seed` would record a traceback for each device type.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            model._init_weights(module)
        return module


def uninitialized_buffers(module: nn.Module) -> list[str]:
    """Return the names of floating-point buffers that `init_buffers` allocated but did not initialize."""
    buffers = ((name, b) for name, b in module.named_buffers() if b.is_floating_point() and not b.is_meta)
    return [name for name, buffer in buffers if buffer.isnan().any()]


def _undefined(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor shaped like `tensor`, full of NaN (integers: 0), which shows uninitialized elements."""
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0, device="cpu")
