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
from odc_mpi.errors import UserError, one_line_message, warn
from odc_mpi.models.heads import replaced_forwards
from odc_mpi.models.packed.small_model import random_tokens, small_model

_SETTING = "model.cache_frozen_prefix"
#: Types in which values are stored, by the bytes of a value: NumPy has no bfloat16.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Prefix:
    """Frozen layers at the beginning of a model.

    Attributes:
        num_layers: Number of layers in the prefix.
        num_all_layers: Number of layers in the model.
        width: Number of values that the prefix computes for each token.
        in_tuple: True if a layer returns its output as the first element of a tuple.
    """

    num_layers: int
    num_all_layers: int
    width: int
    in_tuple: bool


def decoder_layers(module: Any) -> nn.ModuleList:
    """Return the layers of a model. Raises `UserError` if they are not in one list."""
    count = module.config.get_text_config().num_hidden_layers
    for each in module.modules():
        if isinstance(each, nn.ModuleList) and len(each) == count:
            return each
    raise UserError(
        f"{_SETTING}: expected false for {type(module).__name__}, whose layers are not in one list, got true"
    )


def prefix_units(module: Any) -> list[type | nn.Module]:
    """Return the units of a model for `shard_model`: its layers, and the embedding apart from the head."""
    return [*dict.fromkeys(map(type, decoder_layers(module))), module.get_input_embeddings()]


def find_prefix(module: Any) -> Prefix:
    """Find the frozen prefix of a model with adapters.

    Raises `UserError` if there is none, if it has dropout, or if later layers need more than its output.
    """
    layers, config = decoder_layers(module), module.config.get_text_config()
    trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    num_layers = trained.index(True) if True in trained else len(layers)
    first = next(layers.parameters())
    for parameter in module.parameters():
        if parameter is first:
            break
        num_layers = 0 if parameter.requires_grad else num_layers
    if not num_layers:
        raise UserError(
            f"{_SETTING}: expected frozen layers before the first trained parameter, got none: set "
            "lora.layers_to_transform to the last layers, or the setting to false"
        )
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{_SETTING}: expected false with model.config.output_router_logits, whose loss needs all layers"
        )
    try:
        in_tuple = _try_prefix(config, num_layers)
    except Exception as error:  # transformers raises exceptions of many kinds for a configuration that it cannot use
        reason = one_line_message(error)
        raise UserError(f"{_SETTING}: expected false for {type(module).__name__}, got true: {reason}") from error
    return Prefix(num_layers, len(layers), config.hidden_size, in_tuple)


def _try_prefix(config: Any, num_layers: int) -> bool:
    """Return True if layers return tuples. Raise `UserError` if the first ones cannot be replaced by their output."""
    with small_model(config) as module, torch.no_grad():
        outputs: list[Any] = []
        tokens, layers = random_tokens(module, 12), decoder_layers(module)
        layers[num_layers - 1].register_forward_hook(lambda *call: outputs.append(call[-1]))
        expected = module(input_ids=tokens, use_cache=False).logits
        in_tuple = isinstance(outputs[0], tuple)
        hidden = outputs[0][0] if in_tuple else outputs[0]
        if hidden.shape != (1, 12, module.config.get_text_config().hidden_size):
            raise UserError("its layers return more than hidden_size values for each token")
        with replaced_forwards(_replacements(module, num_layers, hidden, in_tuple)):
            found = module(input_ids=tokens, use_cache=False).logits
        if not torch.equal(found, expected):
            raise UserError(f"its later layers need more than the output of layer {num_layers - 1}")
        module.train()
        first, second = ([module(input_ids=tokens, use_cache=False), outputs[-1]][-1] for _ in range(2))
        if not torch.equal(*(each[0] if in_tuple else each for each in (first, second))):
            raise UserError(f"its first {num_layers} layers have dropout or noise: set it to 0 in model.config")
    return in_tuple


def _replacements(
    module: Any, num_layers: int, hidden: torch.Tensor, in_tuple: bool
) -> Mapping[nn.Module, Callable[..., Any]]:
    """Return forward methods for the embedding and the first layers, of which the last one returns `hidden`."""
    layers = list(decoder_layers(module)[:num_layers])

    def result(states: torch.Tensor) -> Any:
        return (states,) if in_tuple else states

    return {
        module.get_input_embeddings(): lambda *_, **__: torch.zeros_like(hidden),
        **dict.fromkeys(layers, lambda states, *_, **__: result(states)),
        layers[-1]: lambda *_, **__: result(hidden),
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

    Args:
        module: Model that trains on packed sequences. Hooks are added to it.
        store: Hidden states that are stored and read.
        dtype: Dtype of the hidden states.

    Attributes:
        on_switch: Function to call when a forward pass uses other layers than the one before.
    """

    def __init__(self, module: Any, prefix: Prefix, store: HiddenStates, dtype: torch.dtype) -> None:
        self._module, self._prefix, self.store, self._dtype = module, prefix, store, dtype
        self.on_switch: Callable[[], None] = lambda: None
        self._stores, self._reads = True, False
        # Of the running forward pass: keys and bounds of the sequences to store, and replaced forward methods.
        self._missing: tuple[list[bytes], list[int]] | None = None
        self._replaced = ExitStack()
        # Of the latest microbatch that was read, since a reference model reads it, too.
        self._latest: tuple[list[bytes], torch.Tensor | None] = [], None
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

    def refresh(self) -> None:
        """Find what other ranks have stored. See `HiddenStates`."""
        self.store.refresh()
        self._latest = [], None

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (given := kwargs.get("cu_seq_lens_q")) is None:  # generation
            return
        bounds = given.tolist()
        keys = _sequence_keys(kwargs, bounds)
        if keys != self._latest[0]:
            values = self.store.read(keys)
            states = None if values is None else torch.from_numpy(values).view(self._dtype)[None]
            self._latest = keys, None if states is None else states.to(kwargs["input_ids"].device)
        hidden = self._latest[1]
        if self._reads != (hidden is not None):
            self._reads = not self._reads
            self.on_switch()
        if hidden is not None:
            prefix = self._prefix
            forwards = _replacements(self._module, prefix.num_layers, hidden, prefix.in_tuple)
            self._replaced.enter_context(replaced_forwards(forwards))
        elif self._stores:
            self._missing = keys, bounds

    def _end(self, *_: Any) -> None:
        self._missing = None
        self._replaced.close()

    def _store(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._missing is None:
            return
        keys, bounds = self._missing
        hidden = output[0] if self._prefix.in_tuple else output
        if hidden.dtype is not self._dtype:
            warn(f"WARNING: {_SETTING}: expected {self._dtype} from the frozen layers, got {hidden.dtype}: not stored")
            self._stores = False
            return
        rows = hidden[0].detach().cpu().view(_INTEGERS[self._dtype.itemsize]).numpy()
        for key, (begin, end) in zip(keys, pairwise(bounds), strict=True):
            if key not in self.store:
                self.store.append(key, rows[begin:end])
