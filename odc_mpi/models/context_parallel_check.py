"""Whether the sequences of a model can be cut into pieces, and what its attention then moves.

A piece has to come to the same as the part of the whole sequence that it is. That needs causal attention by our
function in every layer, over the whole sequence; a loss that is a sum over tokens, with labels that are shifted before
the cut; and nothing else that looks at other tokens, or at how many there are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from odc_mpi.data.loader import flash_attention_kwargs
from odc_mpi.errors import one_line_message
from odc_mpi.models.attention import ContextParallelUnsupportedError

#: Rotary frequencies that depend on the length of what is computed.
_LENGTH_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a model whose sequences can be cut.

    Attributes:
        num_layers: Layers with attention.
        token_numel: Elements of the keys and values of a token in one layer.
    """

    num_layers: int
    token_numel: int


def attention_shape(module: transformers.PreTrainedModel, num_tokens: int) -> AttentionShape:
    """Try a piece on a model on the meta device, which computes nothing but shapes.

    Args:
        module: Without adapters; its parameters are on the meta device.
        num_tokens: Of the longest sequence.

    Raises:
        UncuttableError: Its sequences cannot be cut; the message says why.
    """
    config = module.config.get_text_config()
    ropes = set(_rope_types(config.to_dict())) & set(_LENGTH_ROPES)
    if ropes:
        raise ContextParallelUnsupportedError(
            f"its rotary frequencies depend on the length: {', '.join(sorted(ropes))}"
        )
    if getattr(config, "output_router_logits", False):
        raise ContextParallelUnsupportedError(
            "its loss has a part for the balance of experts, which is no sum over tokens"
        )
    loss_function = module.loss_function
    if loss_function is not ForCausalLMLoss:
        raise ContextParallelUnsupportedError("its loss is not the cross entropy of the next token")
    survey, loss = _Survey(num_tokens), _RecordingLoss()
    training = module.training
    module.loss_function = loss
    try:
        module.train()
        output = module(**_inputs(), chunk=survey)
    except ContextParallelUnsupportedError:
        raise
    except Exception as error:  # as `build` has it: what reads values cannot run on the meta device
        raise ContextParallelUnsupportedError(
            f"{type(module).__name__} cannot be tried without values: {one_line_message(error)}"
        ) from error
    finally:
        module.loss_function = loss_function
        module.train(training)
    if not loss.is_exact(output.loss):
        raise ContextParallelUnsupportedError("it does not hand shifted labels to its loss, or adds to it")
    return survey.shape()


class _Survey:
    """A piece that notes what attention it is asked for."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._layers: list[int] = []
        self._sizes: list[int] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Note a call."""
        self._layers.append(layer)
        self._sizes.append((key.numel() + value.numel()) // key.shape[2])
        return torch.empty_like(query)

    def shape(self) -> AttentionShape:
        """Return the shape of the attention that was asked for."""
        if not self._layers or self._layers != list(range(len(self._layers))):
            raise ContextParallelUnsupportedError(
                f"expected one attention in each layer, in order, got layers {self._layers}"
            )
        return AttentionShape(len(self._layers), max(self._sizes))


class _RecordingLoss:
    """A loss function that notes its arguments."""

    def __init__(self) -> None:
        self._kwargs: Mapping[str, Any] = {}
        self._value: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._kwargs = kwargs
        self._value = torch.zeros((), device="meta")
        return self._value

    def is_exact(self, loss: torch.Tensor | None) -> bool:
        """Return whether a model's loss is this one's, with labels that were shifted before."""
        value = self._value
        if value is None or loss is not value or value._version:
            return False
        return self._kwargs.get("shift_labels") is not None and self._kwargs.get("num_items_in_batch") is not None


def _inputs() -> dict[str, Any]:
    """Return a piece of three tokens: the arguments of `data.loader.read_piece`."""
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    inputs = dict.fromkeys(("input_ids", "position_ids", "labels", "shift_labels"), tokens)
    # The mask of ones keeps transformers from looking for sequences in the positions, which have no values here.
    inputs["attention_mask"] = torch.ones_like(tokens)
    return {**inputs, **flash_attention_kwargs([3]), "num_items_in_batch": 3}


def _rope_types(content: Any) -> Iterator[str]:
    """Yield the types of rotary embeddings in a configuration, which may have them by kinds of layers."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)
