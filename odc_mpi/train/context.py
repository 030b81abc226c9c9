"""The longest sequences of a minibatch in pieces over ranks: docs/context.md.

Whether a run cuts sequences: what its model, settings and data allow, and what memory that takes. Then this rank's
pieces as microbatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from odc_mpi.comm.context.piece_windows import PieceWindows, Sizes
from odc_mpi.comm.context.pieces import PieceExchange
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Batch, Minibatch, read_piece
from odc_mpi.errors import UserError
from odc_mpi.models.attention import UncuttableError
from odc_mpi.models.build import BuiltModel
from odc_mpi.models.cuttable import attention_shape
from odc_mpi.models.piece_attention import Exchange, attend
from odc_mpi.train.settings import Config


@dataclass(frozen=True)
class Cutting:
    """Whether and how sequences are cut.

    Attributes:
        sizes: Of the memory for pieces; None if nothing is cut.
        reason: Why nothing is cut, to be said once; None if nobody asked for it.
    """

    sizes: Sizes | None = None
    reason: str | None = None

    def told(self) -> dict[str, str]:
        """Return a line for the start of a run, if there is something to say. Local."""
        if self.sizes is None:
            return {"pieces": f"none: {self.reason}"} if self.reason else {}
        room = f"{self.sizes.num_bytes / 2**20:,.1f} MiB per rank for their keys and values"
        return {"pieces": f"of sequences too long for an even share; {room}"}


def choose(config: Config, built: BuiltModel, dataset: Dataset, size: int) -> Cutting:
    """Find out whether a run cuts sequences. Local; the same outcome on every rank.

    Args:
        config: Of the run.
        built: The model, without adapters.
        dataset: To train on.
        size: Number of ranks.

    Raises:
        UserError: `data.context_parallel` does not go with another setting.
    """
    if config.data.context_parallel == "off":
        return Cutting()
    if size == 1:
        return Cutting(reason="one rank has nobody to share a sequence with")
    longest = int(dataset.lengths.max())
    try:
        shape = attention_shape(built.module, longest)
    except UncuttableError as error:
        return Cutting(reason=f"{type(built.module).__name__} trains whole sequences: {error}")
    # With adapters a layer may compute in their type.
    narrow = config.model.param_dtype == "bfloat16" and config.lora.r is None
    token_bytes = shape.token_numel * (2 if narrow else 4)
    max_piece_tokens = min(longest, config.data.max_tokens_per_microbatch)
    return Cutting(Sizes(shape.num_layers, token_bytes, max_piece_tokens, longest - 1))


def check(config: Config) -> None:
    """Refuse settings that do not go with `data.context_parallel`. Local."""
    if config.data.context_parallel == "off":
        return
    for setting, value, wanted in (
        ("run.objective", config.run.objective, "sft"),
        ("data.balance", config.data.balance, "dynamic"),
        ("run.device", config.run.device, "cpu"),
        ("model.compile", str(config.model.compile).lower(), "false"),
    ):
        if value != wanted:
            raise UserError(
                f"data.context_parallel: auto goes with {setting} {wanted}, got {value}: set {setting} to {wanted}, or "
                "data.context_parallel to off"
            )


class Pieces:
    """This rank's pieces of the sequences of one minibatch after the other."""

    def __init__(self, windows: PieceWindows) -> None:
        self.windows = windows
        self._num_cut = 0

    def batches(self, minibatch: Minibatch) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's pieces, and of each its number in its sequence. One-sided.

        Between one and the next its forward and backward have to run. To be called for every minibatch, by every rank:
        the sequences that are cut are counted.
        """
        first, self._num_cut = self._num_cut + 1, self._num_cut + len(minibatch.plan.splits)
        for turn, split in enumerate(minibatch.plan.splits, first):
            if minibatch.rank not in split.ranks:
                continue
            number, index = split.ranks.index(minibatch.rank), int(minibatch.indices[split.sequence])
            batch = read_piece(minibatch.dataset, index, *split.bounds[number : number + 2])
            with PieceExchange(self.windows, turn, split.bounds, split.ranks, f"sequence {index}") as exchange:
                yield replace(batch, inputs=batch.inputs | {"piece": _Piece(exchange, split.bounds[-1])}), number


@dataclass(frozen=True)
class _Piece:
    """A piece as `models.attention` takes it."""

    exchange: Exchange
    num_tokens: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Attend to all tokens of the sequence up to the piece's own. One-sided, waits for earlier pieces."""
        return attend(query, key, value, scaling, layer, self.exchange)
