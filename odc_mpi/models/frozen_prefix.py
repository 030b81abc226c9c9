"""Frozen layers before the first trained one, whose output for a sequence never changes and is computed once.

`find_prefix` finds the layers, and tries with a small copy of the model that later layers need nothing but their
output. Hooks of a `FrozenPrefix` store the output of the last one for each sequence. If it is stored for all sequences
of a microbatch, the forward passes of the embedding and of these layers are replaced, so their units are not fetched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from odc_mpi.data.dataset.hidden_states import KEY_BYTES, HiddenStates
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.heads import replaced_forwards
from odc_mpi.models.packed.small_model import random_tokens, small_model

#: Types in which values are stored, by the bytes of a value: NumPy has no bfloat16.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Prefix:
    """Number of frozen layers at the beginning of a model, of all layers, and of the values that a layer returns."""

    num_layers: int
    num_all_layers: int
    width: int


def decoder_layers(module: Any) -> nn.ModuleList:
    """Return the layers of a model, which transformers has in a list."""
    count = module.config.get_text_config().num_hidden_layers
    return next(each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == count)


def prefix_units(module: Any) -> list[type | nn.Module]:
    """Return the units of a model for `shard_model`: its layers, and the embedding apart from the head."""
    return [*dict.fromkeys(map(type, decoder_layers(module))), module.get_input_embeddings()]


def find_prefix(module: Any) -> Prefix:
    """Find the frozen prefix of a model with adapters.

    Raises `UserError` if there is none, if it has dropout, or if later layers need more than its output.
    """
    layers, config = decoder_layers(module), module.config.get_text_config()
    order = {parameter: i for i, parameter in enumerate(module.parameters())}
    first = min((i for parameter, i in order.items() if parameter.requires_grad), default=len(order))
    num_layers = sum(all(order[parameter] < first for parameter in layer.parameters()) for layer in layers)
    try:
        if getattr(config, "output_router_logits", False):
            raise UserError("with output_router_logits, the loss needs all layers")
        if not num_layers:
            raise UserError("no layer is before the first trained parameter: set lora.layers_to_transform")
        _try_prefix(config, num_layers)
    except Exception as error:  # transformers raises exceptions of many kinds for a configuration that it cannot use
        reason = one_line_message(error)
        name = type(module).__name__
        raise UserError(f"model.cache_frozen_prefix: expected false for {name}, got true: {reason}") from error
    return Prefix(num_layers, len(layers), config.hidden_size)


def _try_prefix(config: Any, num_layers: int) -> None:
    """Raise `UserError` if the first layers of a small copy of a model cannot be replaced by their output."""
    with small_model(config) as module, torch.no_grad():
        outputs: list[torch.Tensor] = []
        tokens, last = random_tokens(module, 12), decoder_layers(module)[num_layers - 1]
        last.register_forward_hook(lambda *call: outputs.append(call[-1]))
        expected = module(input_ids=tokens, use_cache=False).logits
        if outputs[0].shape != (1, 12, module.config.get_text_config().hidden_size):
            raise UserError("its layers return more than hidden_size values for each token")
        with replaced_forwards(_replacements(module, num_layers, outputs[0])):
            found = module(input_ids=tokens, use_cache=False).logits
        if not torch.equal(found, expected):
            raise UserError(f"its later layers need more than the output of layer {num_layers - 1}")
        module.train()
        for _ in range(2):
            module(input_ids=tokens, use_cache=False)
        if not torch.equal(*outputs[-2:]):
            raise UserError(f"its first {num_layers} layers have dropout or noise: set it to 0 in model.config")


def _replacements(module: Any, num_layers: int, hidden: torch.Tensor) -> Mapping[nn.Module, Callable[..., Any]]:
    """Return forward methods for the embedding and the first layers, of which the last one returns `hidden`."""
    layers = list(decoder_layers(module)[:num_layers])
    return {
        module.get_input_embeddings(): lambda *_, **__: torch.zeros_like(hidden),
        **dict.fromkeys(layers, lambda states, *_, **__: states),
        layers[-1]: lambda *_, **__: hidden,
    }


def _sequence_keys(inputs: Mapping[str, Any], bounds: list[int]) -> list[bytes]:
    """Return a digest for each sequence of a microbatch: of its tokens, and of those of the prompt that it shares."""
    tokens = first = inputs["input_ids"][0].cpu().numpy()
    keys = []
    for (begin, end), num_keys in zip(pairwise(bounds), inputs["cu_seq_lens_k"].diff().tolist(), strict=True):
        own, num_shared = tokens[begin:end], num_keys - (end - begin)
        first = first if num_shared else own  # the sequence with the prompt, which others share
        digest = blake2b(first[:num_shared], digest_size=KEY_BYTES, salt=num_shared.to_bytes(8, "little"))
        digest.update(own)
        keys.append(digest.digest())
    return keys


class FrozenPrefix:
    """Computes the frozen prefix of a model, sharded or not, once for each sequence.

    Hooks are added to `module`, which trains on packed sequences. Hidden states have the type `dtype`.

    Attributes:
        store: Hidden states that are stored and read.
        on_switch: Function to call when a forward pass uses other layers than the one before.
    """

    def __init__(self, module: Any, prefix: Prefix, store: HiddenStates, dtype: torch.dtype) -> None:
        self._module, self._num_layers, self.store, self._dtype = module, prefix.num_layers, store, dtype
        self.on_switch: Callable[[], None] = lambda: None
        self._stores, self._reads = True, False
        # Of the running forward pass: keys and bounds of the sequences to store, and replaced forward methods.
        self._missing: tuple[list[bytes], list[int]] | None = None
        self._replaced = ExitStack()
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        module.register_forward_hook(self._end, always_call=True)
        decoder_layers(module)[prefix.num_layers - 1].register_forward_hook(self._store)

    @contextmanager
    def without_storing(self) -> Iterator[None]:
        """Context manager for forward passes over sequences that will not occur again."""
        self._stores = False
        try:
            yield
        finally:
            self._stores = True

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (given := kwargs.get("cu_seq_lens_q")) is None:  # generation
            return
        bounds = given.tolist()
        keys = _sequence_keys(kwargs, bounds)
        values = self.store.read(keys)
        if self._reads != (values is not None):
            self._reads = not self._reads
            self.on_switch()
        if values is not None:
            hidden = torch.from_numpy(values).view(self._dtype)[None].to(kwargs["input_ids"].device)
            self._replaced.enter_context(replaced_forwards(_replacements(self._module, self._num_layers, hidden)))
        elif self._stores:
            self._missing = keys, bounds

    def _end(self, *_: Any) -> None:
        self._missing = None
        self._replaced.close()

    def _store(self, layer: nn.Module, args: Any, hidden: torch.Tensor) -> None:
        if self._missing is None:
            return
        if hidden.dtype is not self._dtype:
            raise UserError(
                f"model.cache_frozen_prefix: expected layers in {self._dtype}, got {hidden.dtype}: set false"
            )
        rows = hidden[0].detach().cpu().view(_INTEGERS[self._dtype.itemsize]).numpy()
        for key, (begin, end) in zip(self._missing[0], pairwise(self._missing[1]), strict=True):
            self.store.append(key, rows[begin:end])
