"""Microbatches of several rows, padded at the end, for models that cannot keep the sequences of one row apart.

Such models carry a state from token to token (state spaces, convolutions, linear attention), or compute the positions
of tokens themselves. A microbatch is still one row of concatenated sequences. Hooks of the model convert it to a row
for each sequence, and the input of the head back to one row. In a causal model, padding at the end reaches no token, so
it needs no mask. `equals_single_sequences` tries this.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from odc_mpi.data.microbatch import flash_attention_kwargs
from odc_mpi.models.packed.small_model import random_tokens, small_model

#: Arguments that describe packed inputs.
PACKED_INPUTS = frozenset({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
#: Numbers of tokens of the sequences in a trial, and the largest relative difference from a sequence alone. A state
#: that reaches the next sequence changes outputs by a third and more, rounding to float32 inside a layer by 2e-7.
_LENGTHS, _TOLERANCE = (7, 1, 12), 1e-5


class PaddedRows:
    """Hooks that let a causal model compute each sequence of a microbatch in a row of its own."""

    def __init__(self, module: Any) -> None:
        self._tokens: torch.Tensor | None = None
        self._head: nn.Module | None = None
        module.register_forward_pre_hook(self._split, with_kwargs=True)

    def _split(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bounds = kwargs.get("cu_seq_lens_q")
        self._tokens = None
        if bounds is None:  # generation, or rows
            return args, kwargs
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKED_INPUTS}
        lengths = bounds.diff()
        if len(lengths) > 1:
            if self._head is None:  # not before, because adapters may wrap it
                self._head = module.get_output_embeddings()
                self._head.register_forward_pre_hook(self._join)
            tokens = kwargs["input_ids"][0]
            kwargs["input_ids"] = rows = pad_sequence(tokens.split(lengths.tolist()), batch_first=True)
            is_token = torch.arange(rows.shape[1]) < lengths[:, None]
            self._tokens = is_token.flatten().nonzero()[:, 0].to(tokens.device)
        return args, kwargs

    def _join(self, head: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        return None if self._tokens is None else (args[0].flatten(0, 1)[self._tokens][None],)


def equals_single_sequences(config: Any) -> bool:
    """Return True if the hooks give each of three sequences the outputs that it has alone.

    `config` is the configuration of the causal language model. The trial runs a small copy of it (`small_model`).
    """
    try:
        with small_model(config) as module, torch.no_grad():
            tokens = random_tokens(module, sum(_LENGTHS))
            alone = [module(input_ids=each, use_cache=False).logits for each in tokens.split(_LENGTHS, 1)]
            PaddedRows(module)
            joined = module(input_ids=tokens, **flash_attention_kwargs(_LENGTHS)).logits
    except Exception:  # transformers raises exceptions of many kinds for a configuration that it cannot use
        return False
    expected = torch.cat(alone, 1)
    return joined.shape == expected.shape and bool((joined - expected).abs().max() < _TOLERANCE * expected.abs().max())
