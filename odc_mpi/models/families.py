"""Decision on how a model trains: on packed sequences, on padded rows, on one sequence per microbatch, or not at all.

A model trains on packed sequences if only its attention mixes tokens, all of its layers call `packed_attention`, and
its `forward` accepts token positions. This is determined from the layer types, the modules and a trial run on the meta
device. All other causal models have their own attention, and train on padded rows of sequences if a trial with a small
copy shows that this is the same (`models.packed.padded_rows`), else on one sequence per microbatch. `UserError` is
raised for a model that is not causal, that does not use the causal language modeling loss of transformers (for example,
because it does not shift the labels), or whose `forward` changes the weights. docs/models.md lists the families.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn

from odc_mpi.data.microbatch import flash_attention_kwargs
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models import attention
from odc_mpi.models.heads import CAUSAL_LM, prediction_task
from odc_mpi.models.packed.padded_rows import PaddedRows, equals_single_sequences

#: Layer types that carry no state from one packed sequence to the next and mix tokens only through attention.
PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
#: Classes of modules that mix neighboring tokens.
_MIXING_MODULES = (nn.Conv1d, nn.ZeroPad2d, nn.RNNBase)


@dataclass(frozen=True)
class Packing:
    """Decision whether a model trains on packed sequences.

    Attributes:
        unpacked_reason: Reason for not training on packed sequences, or None for training on them.
        config: Configuration of a language model that does not train on packed sequences, otherwise None.
        soft_caps: True if the model trains on packed sequences and its attention applies soft caps to the scores, which
            are then computed explicitly.
    """

    unpacked_reason: str | None = None
    config: Any = field(default=None, compare=False)
    soft_caps: bool = False

    @property
    def packs(self) -> bool:
        """True if the model trains on packed sequences."""
        return self.unpacked_reason is None

    @cached_property
    def pads_rows(self) -> bool:
        """True if a microbatch may have several sequences, each of which the model computes in a padded row.

        The first access runs a trial, which may take seconds. Does not concern prompts with several answers.
        """
        config = self.config
        if config is None or getattr(config, "output_router_logits", False):
            return False  # padding would count in the loss of the routers
        # Rotary frequencies of some types depend on the length of the row.
        depends = not {"longrope", "dynamic"}.isdisjoint(rope_types(config.to_dict()))
        return not depends and equals_single_sequences(config)


def build_for_training(
    build: Callable[[str | None], transformers.PreTrainedModel], setting: str, attn_implementation: str
) -> tuple[transformers.PreTrainedModel, Packing]:
    """Build a model on the meta device, with packed attention if possible. Return the model and its `Packing`.

    A model without packed attention keeps its own attention, and hooks give each sequence a row. Raises `UserError` if
    the model cannot be trained.

    Args:
        build: Function that builds the model with the given transformers attention implementation. None selects the
            model's default. Any `UserError` that it raises must be chained to the transformers exception.
        setting, attn_implementation: Name of the setting for error messages, and "sdpa" or "eager", respectively.
    """
    module: Any
    try:
        module = build(attention.IMPLEMENTATIONS[attn_implementation])
        reason = _unpacked_reason(module)
    except UserError as error:
        if not isinstance(error.__cause__, KeyError):  # the model has a table of attention classes
            raise
        reason = "its attention accepts no attention function"
    packing = Packing(reason) if reason else _try_packed(module)
    if packing.unpacked_reason is not None:
        module = build("eager" if attn_implementation == "eager" else None)
        PaddedRows(module)
        _refuse_untrainable(module, setting)
        if reason is None:  # the trial failed
            _refuse_invalid(module, setting)
        if prediction_task(type(module).__name__) is CAUSAL_LM:
            packing = replace(packing, config=module.config.get_text_config())
    return module, packing


def _unpacked_reason(module: transformers.PreTrainedModel) -> str | None:
    """Return the reason if the class, configuration or modules of a model rule out packing, otherwise None."""
    config = module.config.get_text_config()
    if "longrope" in rope_types(config.to_dict()):
        return "its rotary frequencies depend on the length of the sequence"
    mixing = {type(each).__name__ for each in module.modules() if isinstance(each, _MIXING_MODULES)}
    layer_types = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYER_TYPES
    if layer_types:
        return f"its {', '.join(sorted(layer_types))} layers do not keep packed sequences apart"
    if mixing:
        return f"its modules {', '.join(sorted(mixing))} mix the tokens of packed sequences"
    if not (module._supports_attention_backend or module._supports_sdpa):
        return "its attention accepts no attention function"
    if "position_ids" not in inspect.signature(module.forward).parameters or _reads_is_decoder(module):
        return "it computes the positions of tokens itself"
    return None


def _reads_is_decoder(module: transformers.PreTrainedModel) -> bool:
    """Return True for models of encoder families, which are causal only if `is_decoder` is set."""
    return "self.is_decoder" in inspect.getsource(sys.modules[type(module).__module__])


def _try_packed(module: transformers.PreTrainedModel) -> Packing:
    """Decide by a trial with two short sequences on the meta device whether a model trains on packed sequences."""
    with attention.recorded_calls() as calls:
        try:
            run_trial(module, **trial_inputs([2, 2]))
        except attention.PackingUnsupportedError as error:
            return Packing(str(error))
        except Exception as error:  # a forward raises exceptions of many kinds for an invalid configuration
            if not _is_trial_artifact(error):
                return Packing(f"its attention cannot run packed: {one_line_message(error)}")
        else:
            num_layers = module.config.get_text_config().num_hidden_layers
            if len({layer for layer, _ in calls}) < num_layers:
                return Packing("not all of its layers call the attention function")
    return Packing(soft_caps=any(has_soft_cap for _, has_soft_cap in calls))


def rope_types(content: Any) -> Iterator[str]:
    """Yield the types of rotary embeddings in a configuration, which may specify a type for each layer type."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from rope_types(value)


def run_trial(module: nn.Module, **inputs: Any) -> None:
    """Run a copy of a model on the meta device, since a `forward` may keep what it computed, such as frequencies."""
    copy.deepcopy(module)(**inputs)


def trial_inputs(lengths: Sequence[int], *, packs: bool = True) -> dict[str, Any]:
    """Return the arguments for running a model on the meta device with sequences of the given lengths.

    For a model that trains on one sequence per microbatch, `packs` must be False and `lengths` must have one element.
    """
    num_tokens = sum(lengths)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    # Without a mask, transformers would search the positions for sequences or create a mask of the scores, for which it
    # reads values. Meta tensors have no values.
    mask = torch.ones_like(tokens) if packs else torch.zeros(1, 1, num_tokens, num_tokens, device="meta")
    inputs = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
    return inputs | flash_attention_kwargs(lengths)


def _is_trial_artifact(error: Exception) -> bool:
    """Return True if a model that failed on the meta device may still work on another device.

    For example, an expert router reads values, which meta tensors do not have, and PyTorch's grouped matrix product
    supports some dtypes on a CPU but not on the meta device.
    """
    words = ("meta tensor", "meta device", "'meta'", "data-dependent", "dtype")
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in words)


def _refuse_untrainable(module: transformers.PreTrainedModel, setting: str) -> None:
    """Raise `UserError` if a model is not causal, its loss is not supported, or its `forward` changes the weights."""
    name = type(module).__name__
    if _reads_is_decoder(module) and not getattr(module.config, "is_decoder", True):
        raise UserError(
            f"{setting}: {name} is not causal, because is_decoder is false: set model.config.is_decoder to true"
        )
    if (value := getattr(module.config, "use_bidirectional_attention", None)) in (True, "all"):
        raise UserError(f"{setting}: {name} is not causal, because use_bidirectional_attention is {value}")
    if getattr(module.config, "rescale_every", 0):
        raise UserError(
            f"{setting}: {name} changes its weights in evaluations, which is not possible while they are sharded: set "
            "model.config.rescale_every to 0"
        )
    if getattr(module.config, "z_loss_coefficient", 0):
        raise UserError(
            f"{setting}: {name} adds a z-loss, which is not supported: set model.config.z_loss_coefficient to 0"
        )
    if prediction_task(name) is CAUSAL_LM and "self.loss_function(" not in inspect.getsource(
        inspect.unwrap(type(module).forward)
    ):
        raise UserError(f"{setting}: {name} does not predict the next token: its loss does not shift the labels")


def _refuse_invalid(module: transformers.PreTrainedModel, setting: str) -> None:
    """Raise `UserError` if a forward pass with two tokens on the meta device shows that the model cannot run."""
    try:
        run_trial(module, **trial_inputs([2], packs=False))
    except Exception as error:  # a forward raises exceptions of many kinds for an invalid configuration
        if not _is_trial_artifact(error):
            raise UserError(f"{setting}: {type(module).__name__} cannot run: {one_line_message(error)}") from error
