"""Compilation of layers with torch.compile. All layers of a class share graphs, which have the parameters as inputs.

A layer of a sharded model fetches its parameters on access, which Dynamo cannot trace. Therefore, each layer has a
twin: copies of its modules that share everything with the originals except the parameters. Before each forward pass,
the parameters are fetched outside of the graph and stored in the twin. Parameters and hidden states are inputs of the
graph. The number of tokens is dynamic.

Packed attention reads the boundaries of sequences from a tensor, which a graph cannot do. The attention function is
therefore not compiled. A layer has four graphs: before and after this function, and before and after the attention
module, which calls the function.
"""

import copy
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Cache

from odc_mpi.errors import UserError
from odc_mpi.models.attention import IMPLEMENTATIONS

BACKEND = "inductor"


def compile_layers(module: nn.Module) -> None:
    """Compile the layers of a transformers model: all modules whose class is listed in `module._no_split_modules`.

    Call this before `shard_model`. A forward pass with a key/value cache is not compiled. The first forward and
    backward passes take a minute or more. Raises `UserError` if the model has no such layers or has adapters of fused
    experts, or if the C++ compiler or the Python headers are not installed.
    """
    names = set(getattr(module, "_no_split_modules", None) or ())
    layers = [submodule for submodule in module.modules() if type(submodule).__name__ in names]
    if not layers:
        raise UserError(
            f"model.compile: expected a model with layers, got {type(module).__name__} without any: set it to false"
        )
    if any(hasattr(submodule, "parameter_name") for submodule in module.modules()):  # `adapters.add_in_forward`
        raise UserError("model.compile: layers with adapters of fused experts cannot be compiled: set it to false")
    if BACKEND == "inductor":
        _require_compiler()
    for name in IMPLEMENTATIONS.values():
        AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))
    for layer in layers:
        layer.forward = CompiledForward(layer)


class CompiledForward:
    """Compiled `forward` of a layer. Its parameters may be replaced later, for example by `shard_model`."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._twin = layer, _twin(layer)
        self._parameter_sources = [
            (module._parameters, layer.get_submodule(name))
            for name, module in self._twin.named_modules()
            if module._parameters
        ]
        self._plain = layer.forward
        # The function of the class, so that Dynamo reuses its graphs for all layers of the class.
        self._compiled = torch.compile(type(layer).forward, backend=BACKEND)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the layer on `[batch, tokens, hidden_size]`. One-sided if the model is sharded."""
        # A key/value cache grows with every token and differs by layer, so each call would be compiled again.
        if any(isinstance(value, Cache) for value in kwargs.values()):
            return self._plain(hidden_states, *args, **kwargs)
        if self._twin.training != self._layer.training:
            self._twin.train(self._layer.training)
        _mark_tokens((hidden_states, args, kwargs), hidden_states.shape[1])
        with self._parameters():
            return self._compiled(self._twin, hidden_states, *args, **kwargs)

    @contextmanager
    def _parameters(self) -> Iterator[None]:
        """Store the parameters in the twin. Remove them at the end, so that their memory can be released."""
        for twin_parameters, module in self._parameter_sources:
            twin_parameters.update((key, module._parameters[key]) for key in twin_parameters)
        try:
            yield
        finally:
            for twin_parameters, _ in self._parameter_sources:
                twin_parameters.update(dict.fromkeys(twin_parameters))


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {name: child and _twin(child) for name, child in module._modules.items()}
    return twin


def _mark_tokens(arguments: Any, num_tokens: int) -> None:
    """Mark the token dimensions of all tensors as dynamic, so that Dynamo does not trace a graph for each length."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and num_tokens > 1:
            for dim, size in enumerate(tensor.shape):
                if size == num_tokens:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _require_compiler() -> None:
    """Raise `UserError` without the compiler and headers with which inductor builds CPU kernels and GPU launchers."""
    compiler, headers = os.environ.get("CXX", "g++"), Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None:
        raise UserError(
            f"model.compile: torch.compile needs a C++ compiler, found no {compiler}: install g++, set CXX to another "
            "compiler, or set model.compile to false"
        )
    if not headers.is_file():
        raise UserError(
            f"model.compile: torch.compile needs the Python headers, found no {headers}: install python3-dev, or set "
            "model.compile to false"
        )
