"""Compilation of layers with `torch.compile`. All layers of a class share graphs that take the parameters as inputs.

A layer of a sharded model fetches its parameters on access, which Dynamo cannot trace. Each layer therefore has a twin,
which consists of copies of its modules that share everything with the originals except the parameters. Before each
forward pass, the parameters are fetched outside the graph and stored in the twin. The inputs of the graph are the
parameters and the hidden states, and the number of tokens is dynamic.

Packed attention reads the sequence boundaries from a tensor, which a graph cannot do, so the attention function is not
compiled. As a result, each layer has four graphs: for the code before and after this function in the attention module,
and for the code before and after the attention module.
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
    """Compile the layers of a transformers model: the modules whose classes are listed in `module._no_split_modules`.

    Call this function before `shard_model`. Forward passes with a key/value cache are not compiled. The first forward
    and backward passes take a minute or more. Raises `UserError` if the model has no such layers or has adapters for
    fused experts, or if the C++ compiler or the Python headers are not installed.
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
    """Compiled `forward` of a layer. The layer's parameters may be replaced later, for example by `shard_model`."""

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
        """Run the layer on hidden states, `[batch, tokens, hidden_size]`. One-sided if the model is sharded."""
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
        """Context manager that stores the parameters in the twin and removes them on exit to release their memory."""
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
    """Mark the token dimensions of all tensors as dynamic, so that Dynamo does not trace a graph for every length."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and num_tokens > 1:
            for dim, size in enumerate(tensor.shape):
                if size == num_tokens:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _require_compiler() -> None:
    """Raise `UserError` if inductor lacks the compiler or the headers for building CPU kernels and GPU launchers."""
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
