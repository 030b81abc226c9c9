"""Layers compiled by torch.compile: one graph for all layers of a class, with their parameters as arguments.

A layer of a sharded model looks its parameters up on demand, which Dynamo does not trace. So each layer gets a twin:
modules that share everything with the layer's own but the parameters. These are looked up before the forward, outside
of the graph, and put into the twin: inputs of the graph, like the hidden states, whose number of tokens may change.

Attention over packed sequences reads their boundaries from a tensor, which a graph cannot. Dynamo leaves it out, so a
layer is four graphs: around attention, and around the module that calls it.
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

#: The backend of torch.compile.
BACKEND = "inductor"


def compile_layers(module: nn.Module) -> None:
    """Give the layers of a transformers model, those of its `_no_split_modules`, a compiled forward.

    To be called before `shard_model`. Compiled is what comes without a cache of keys and values; the first forward and
    backward take a minute or more.

    Raises:
        UserError: The model has no such layers; there is no C++ compiler.
    """
    names = set(getattr(module, "_no_split_modules", None) or ())
    layers = [submodule for submodule in module.modules() if type(submodule).__name__ in names]
    if not layers:
        raise UserError(
            f"model.compile: expected a model with layers, {type(module).__name__} has none: set it to false"
        )
    if BACKEND == "inductor":
        _require_compiler()
    for name in IMPLEMENTATIONS.values():
        AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))
    for layer in layers:
        layer.forward = CompiledForward(layer)


class CompiledForward:
    """The forward of a layer, compiled.

    Args:
        layer: Its parameters may become others after this, in the same modules.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._twin = layer, _twin(layer)
        self._parameter_sources = [
            (module._parameters, layer.get_submodule(name))
            for name, module in self._twin.named_modules()
            if module._parameters
        ]
        self._plain = layer.forward
        # Of the class: with all layers of a class the same code, for which Dynamo keeps its graphs.
        self._compiled = torch.compile(type(layer).forward, backend=BACKEND)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the layer. One-sided, if its parameters are sharded.

        Args:
            hidden_states: `[batch, tokens, hidden_size]`.
            *args: Passed on to the layer's forward.
            **kwargs: Passed on as well. With a `Cache` among them the forward is not compiled.
        """
        # A key/value cache grows with every token and differs by layer: each call would be compiled anew.
        if any(isinstance(value, Cache) for value in kwargs.values()):
            return self._plain(hidden_states, *args, **kwargs)
        if self._twin.training != self._layer.training:
            self._twin.train(self._layer.training)
        _mark_tokens((hidden_states, args, kwargs), hidden_states.shape[1])
        with self._parameters():
            return self._compiled(self._twin, hidden_states, *args, **kwargs)

    @contextmanager
    def _parameters(self) -> Iterator[None]:
        """Put the parameters of this call into the twin, which must not keep them from being released."""
        for held, module in self._parameter_sources:
            held.update((key, module._parameters[key]) for key in held)
        try:
            yield
        finally:
            for held, _ in self._parameter_sources:
                held.update(dict.fromkeys(held))


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {name: child and _twin(child) for name, child in module._modules.items()}
    return twin


def _mark_tokens(arguments: Any, num_tokens: int) -> None:
    """Let Dynamo know which dimensions change, before it has made a graph for one length."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and num_tokens > 1:
            for dim, size in enumerate(tensor.shape):
                if size == num_tokens:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _require_compiler() -> None:
    """Refuse a machine on which inductor cannot compile for the CPU, or start kernels on a GPU."""
    compiler, headers = os.environ.get("CXX", "g++"), Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None:
        raise UserError(
            f"model.compile: expected a C++ compiler, as torch.compile needs one, found no {compiler}: install g++, "
            "name another in CXX, or set model.compile to false"
        )
    if not headers.is_file():
        raise UserError(
            f"model.compile: expected Python's headers, as torch.compile needs them, found no {headers}: install "
            "python3-dev, or set model.compile to false"
        )
