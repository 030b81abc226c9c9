"""Context parallelism: ranks compute chunks of the longest sequences of a minibatch. See docs/scheduling.md."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch, read_chunk
from odc_mpi.errors import UserError
from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.context_parallel_attention import KVExchange, context_parallel_attention
from odc_mpi.models.context_parallel_check import attention_shape
from odc_mpi.training.settings import Config


def plan_context_parallel(config: Config, meta_model: MetaModel, dataset: Dataset, size: int) -> KVSizes | str | None:
    """Return the sizes of the buffers for keys and values, or the reason (text) why no sequence can be split.

    Returns None if `data.context_parallel` is off. `meta_model` must lack adapters. `size` is the number of ranks.
    """
    if config.data.context_parallel == "off":
        return None
    if size == 1:
        return "context parallelism needs at least 2 ranks"
    if not meta_model.packing.packs:
        return f"the model does not pack: {meta_model.packing.unpacked_reason}"
    longest = int(dataset.lengths.max())
    try:
        shape = attention_shape(meta_model.module, longest)
    except ContextParallelUnsupportedError as error:
        return f"{type(meta_model.module).__name__} does not support it: {error}"
    # With adapters, which are float32, a layer may compute in float32.
    narrow = config.model.param_dtype == "bfloat16" and config.lora.r is None
    token_bytes = shape.token_numel * (2 if narrow else 4)
    max_chunk_tokens = min(longest, config.data.max_tokens_per_microbatch)
    return KVSizes(shape.num_layers, token_bytes, max_chunk_tokens, longest - 1)


def validate_context_parallel(config: Config) -> None:
    """Raise `UserError` if `data.context_parallel` is auto and another setting does not support it."""
    if config.data.context_parallel == "off":
        return
    for key, required in (("run.objective", "sft"), ("data.balance", "dynamic"), ("model.compile", False)):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value != required:
            expected, got = str(required).lower(), str(value).lower()
            raise UserError(
                f"data.context_parallel: auto requires {key} {expected}, got {got}: set {key} to {expected}, or "
                "data.context_parallel to off"
            )


def chunk_microbatches(windows: KVWindows, minibatch: Minibatch, first: int) -> Iterator[tuple[Microbatch, int]]:
    """Yield this rank's chunks as microbatches, each with the chunk's index in its sequence. One-sided.

    The caller must run the forward and backward passes of a chunk before requesting the next one. `first` is the number
    of the minibatch's first split sequence. In a run, all ranks number the split sequences consecutively from 1.
    """
    for turn, split in enumerate(minibatch.plan.splits, first):
        if minibatch.rank not in split.ranks:
            continue
        number, index = split.ranks.index(minibatch.rank), int(minibatch.indices[split.position])
        microbatch = read_chunk(minibatch.dataset, index, *split.bounds[number : number + 2])
        with WindowKVExchange(windows, turn, split.bounds, split.ranks, f"sequence {index}") as exchange:
            yield (
                replace(microbatch, inputs=microbatch.inputs | {"chunk": _Chunk(exchange, split.bounds[-1])}),
                number,
            )


@dataclass(frozen=True)
class _Chunk:
    """A chunk in the form that `models.attention` expects."""

    exchange: KVExchange
    num_tokens: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Attend to this chunk and all earlier ones, waiting for the ranks that compute the earlier ones. One-sided."""
        return context_parallel_attention(query, key, value, scaling, layer, self.exchange)
