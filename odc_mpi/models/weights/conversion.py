"""Names and layouts of published weights, from the conversion mapping with which transformers loads and saves models.

Published files may store the experts of a layer separately, use parameter names that differ from those in the module,
or omit the prefix of the base model. The functions here convert only names and shapes, without reading weights.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.weights.placed_tensor import PlacedTensor


def loaded_tensors(
    module: transformers.PreTrainedModel, stored: Mapping[str, Callable[[], PlacedTensor]], wanted: Container[str]
) -> dict[str, PlacedTensor]:
    """Return, for each wanted tensor of a module, a `PlacedTensor` that locates its elements in the stored tensors.

    The result is keyed by the names in the module. Wanted tensors that are not in the model's files are omitted. Raises
    `UserError` if the shapes of stored tensors do not fit, or if a conversion computes new values.

    Args:
        stored: Functions, keyed by the names of the tensors in the files. Each returns the `PlacedTensor` of its stored
            tensor, and is called only if this tensor is used.
        wanted: Names of parameters and buffers in the module.
    """
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = module.base_model_prefix, module.state_dict()
    conversions: dict[str, WeightRenaming | WeightConverter] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state or name not in wanted:
            continue
        conversion = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(key, name)
        # The conversion calls a function when it needs the tensor; its annotation names only futures.
        conversions.setdefault(name, conversion).add_tensor(name, key, pattern or key, cast(Any, stored[key]))
    loaded: dict[str, PlacedTensor] = {}
    for name, conversion in conversions.items():
        try:
            converted = conversion.convert(name, model=module, config=module.config)
        except NotImplementedError as error:
            raise UserError(
                f"model.path: {name} cannot be read by slices ({error}): save the model with save_pretrained of "
                "transformers and save_original_format=False"
            ) from error
        except UserError:  # from reading a file
            raise
        except (ValueError, RuntimeError, AttributeError) as error:  # inconsistent shapes
            problem = one_line_message(error)
            raise UserError(f"model.path: the stored weights of {name} do not fit: {problem}") from error
        for target, tensor in converted.items():
            loaded[target] = tensor[0] if isinstance(tensor, list) else tensor
    return loaded


def published_tensors(
    module: transformers.PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, PlacedTensor]:
    """Return the tensors that `save_pretrained` writes, keyed by name, as `PlacedTensor` views of a module's tensors.

    `shapes` contains the shapes of the module's parameters and persistent buffers. Tied parameters occur only once.
    """
    ignored = set(module._keys_to_ignore_on_save or ())
    state: dict[str, Any] = {
        name: PlacedTensor.of(name, shape) for name, shape in shapes.items() if name not in ignored
    }
    published = revert_weight_conversion(module, state)
    return {name: published[name] for name in sorted(published, key=dot_natural_key)}
