"""Check that a model supports context parallelism, and measure the size of its keys and values.

The results for a chunk must be the same as in the unsplit sequence. Every layer must therefore attend causally to the
full sequence through `packed_attention`, and no other operation may depend on other tokens or the sequence length.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from typing_extensions import override

from odc_mpi.errors import one_line_message
from odc_mpi.models.attention import ContextParallelUnsupportedError, SequenceChunk
from odc_mpi.models.families import trial_inputs

#: Types of rotary embeddings whose frequencies depend on the number of tokens in the input.
_LENGTH_ROPES = ("dynamic", "longrope")


class AttentionShape(NamedTuple):
    """Shape of the attention in a model that supports context parallelism.

    `token_numel` is the number of elements in the keys and values of one token in one layer (maximum over the layers).
    """

    num_layers: int
    token_numel: int


def attention_shape(module: transformers.PreTrainedModel, num_tokens: int) -> AttentionShape:
    """Check that a model supports context parallelism, and return the shape of its attention.

    The check runs a forward pass of `module`, which must be on the meta device, in training mode and without adapters.
    `num_tokens` is the length of the longest sequence. Raises `ContextParallelUnsupportedError` if the check fails.
    """
    config = module.config.get_text_config()
    if ropes := sorted(set(_rope_types(config.to_dict())) & set(_LENGTH_ROPES)):
        raise ContextParallelUnsupportedError(f"its rotary frequencies depend on the length: {', '.join(ropes)}")
    if getattr(config, "output_router_logits", False):
        raise ContextParallelUnsupportedError("its loss has a term for the balance of experts")
    recorder = _AttentionRecorder(num_tokens)
    try:
        module(**trial_inputs([3]), chunk=recorder)
    except ContextParallelUnsupportedError:
        raise
    except Exception as error:  # for example a module that reads values, see `build`
        raise ContextParallelUnsupportedError(
            f"{type(module).__name__} cannot run on the meta device: {one_line_message(error)}"
        ) from error
    if not recorder.layers or recorder.layers != list(range(len(recorder.layers))):
        raise ContextParallelUnsupportedError(f"expected one attention in each layer, in order, got {recorder.layers}")
    return AttentionShape(len(recorder.layers), max(recorder.sizes))


class _AttentionRecorder(SequenceChunk):
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.layers: list[int] = []
        self.sizes: list[int] = []

    @override
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.sizes.append((key.numel() + value.numel()) // key.shape[2])
        return torch.empty_like(query)


def _rope_types(content: Any) -> Iterator[str]:
    """Yield the types of rotary embeddings in a configuration, which may specify a type for each layer type."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)
