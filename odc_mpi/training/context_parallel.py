"""The longest sequences of a minibatch in pieces over ranks: docs/context_parallel.md.

Whether a run cuts sequences: what its model, settings and data allow, and what memory that takes. Then this rank's
pieces as microbatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Microbatch, Minibatch, read_chunk
from odc_mpi.errors import UserError
from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.context_parallel_attention import KVExchange, context_parallel_attention
from odc_mpi.models.context_parallel_check import attention_shape
from odc_mpi.training.settings import Config


@dataclass(frozen=True)
class ContextParallelSetup:
    """Whether and how sequences are cut.

    Attributes:
        sizes: Of the memory for pieces; None if nothing is cut.
        reason: Why nothing is cut, to be said once; None if nobody asked for it.
    """

    sizes: KVSizes | None = None
    reason: str | None = None

    def startup_lines(self) -> dict[str, str]:
        """Return a line for the start of a run, if there is something to say."""
        if self.sizes is None:
            return {"cp": f"off: {self.reason}"} if self.reason else {}
        memory = f"{self.sizes.num_bytes / 2**20:,.1f} MiB per rank for their keys and values"
        return {"cp": f"of sequences too long for an even share; {memory}"}


def plan_context_parallel(config: Config, meta_model: MetaModel, dataset: Dataset, size: int) -> ContextParallelSetup:
    """Find out whether a run cuts sequences. Local; the same outcome on every rank.

    Args:
        config: Of the run.
        meta_model: The model, without adapters.
        dataset: To train on.
        size: Number of ranks.

    Raises:
        UserError: `data.context_parallel` does not go with another setting.
    """
    if config.data.context_parallel == "off":
        return ContextParallelSetup()
    if size == 1:
        return ContextParallelSetup(reason="one rank has nobody to share a sequence with")
    longest = int(dataset.lengths.max())
    try:
        shape = attention_shape(meta_model.module, longest)
    except ContextParallelUnsupportedError as error:
        return ContextParallelSetup(reason=f"{type(meta_model.module).__name__} trains whole sequences: {error}")
    # With adapters a layer may compute in their type.
    narrow = config.model.param_dtype == "bfloat16" and config.lora.r is None
    token_bytes = shape.token_numel * (2 if narrow else 4)
    max_chunk_tokens = min(longest, config.data.max_tokens_per_microbatch)
    return ContextParallelSetup(KVSizes(shape.num_layers, token_bytes, max_chunk_tokens, longest - 1))


def validate_context_parallel(config: Config) -> None:
    """Refuse settings that do not go with `data.context_parallel`."""
    if config.data.context_parallel == "off":
        return
    for setting, value, required in (
        ("run.objective", config.run.objective, "sft"),
        ("data.balance", config.data.balance, "dynamic"),
        ("run.device", config.run.device, "cpu"),
        ("model.compile", str(config.model.compile).lower(), "false"),
    ):
        if value != required:
            raise UserError(
                f"data.context_parallel: auto goes with {setting} {required}, got {value}: set {setting} to {required}, or "
                "data.context_parallel to off"
            )


class ChunkMicrobatches:
    """This rank's pieces of the sequences of one minibatch after the other."""

    def __init__(self, windows: KVWindows) -> None:
        self.windows = windows
        self._num_split = 0

    def microbatches(self, minibatch: Minibatch) -> Iterator[tuple[Microbatch, int]]:
        """Yield this rank's pieces, and of each its number in its sequence. One-sided.

        Between one and the next its forward and backward have to run. To be called for every minibatch, by every rank:
        the sequences that are cut are counted.
        """
        first, self._num_split = self._num_split + 1, self._num_split + len(minibatch.plan.splits)
        for turn, split in enumerate(minibatch.plan.splits, first):
            if minibatch.rank not in split.ranks:
                continue
            number, index = split.ranks.index(minibatch.rank), int(minibatch.indices[split.sequence])
            microbatch = read_chunk(minibatch.dataset, index, *split.bounds[number : number + 2])
            with WindowKVExchange(self.windows, turn, split.bounds, split.ranks, f"sequence {index}") as exchange:
                yield (
                    replace(microbatch, inputs=microbatch.inputs | {"chunk": _Chunk(exchange, split.bounds[-1])}),
                    number,
                )


@dataclass(frozen=True)
class _Chunk:
    """A piece as `models.attention` takes it."""

    exchange: KVExchange
    num_tokens: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Attend to all tokens of the sequence up to the piece's own. One-sided, waits for earlier pieces."""
        return context_parallel_attention(query, key, value, scaling, layer, self.exchange)
