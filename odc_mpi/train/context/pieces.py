"""This rank's pieces of sequences as microbatches, and the memory for their keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from odc_mpi.comm.pieces import PieceExchange, PieceWindows
from odc_mpi.data.loader import Batch, Minibatch, read_piece
from odc_mpi.models.piece_attention import Exchange, attend
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.train.context.cutting import Cutting


def open_windows(cutting: Cutting, world: World, model: ShardedModel, *, in_place: bool) -> PieceWindows | None:
    """Allocate memory for keys and values of pieces, if sequences are cut. Collective.

    Args:
        cutting: As chosen.
        world: The ranks.
        model: Whose gradients this rank serves while it waits.
        in_place: Whether ranks of a node read each other's memory in place.

    Raises:
        UserError: There is too little shared memory; raised on every rank.
    """
    if cutting.shape is None:
        return None
    return PieceWindows(world, cutting.sizes, in_place=in_place, serve=model.serve)


class Pieces:
    """This rank's pieces of the sequences of one minibatch after the other.

    Args:
        windows: Of this rank.
    """

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
