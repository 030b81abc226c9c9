"""Saving and restoring islands that train separately (`islands.mode: outer`). Does not communicate.

Each island has parameters and optimizer state of its own, sharded over its R ranks. An outer optimizer, sharded in the
same way on every island, holds the outer parameters, which all islands share. Rank r of island k is rank `k * R + r`.

    model/NAME                      outer parameters; frozen parameters; replicated tensors   written by island 0
    outer/KEY/NAME                  state of the outer optimizer                              written by island 0
    island/K/model/NAME             trainable parameters of island K                          written by island K
    island/K/optimizer/KEY/NAME     optimizer state of island K                               written by island K
    island/K/KEY/NAME               other state of island K, such as a residual               written by island K

State that a run restores:

    checkpoint                      parameters      optimizer state     outer state     other state of the island
    of the same number of islands   island K's      island K's          all             island K's
    of another number of islands    outer           mean                all             none
    without islands                 `model/`        the only one        none            none
"""

from collections.abc import Iterator

import torch
from typing_extensions import override

from odc_mpi.checkpoint.manifest import Manifest, island_prefix
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL, TensorRange, TrainingState, read_for_resume
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.outer_loop import OuterLoop


class IslandTrainingState(TrainingState):
    """This rank's part of the state of a model on several islands, and of its optimizer and outer optimizer.

    `rank` is the rank in the job; `model` is sharded only over the ranks of this rank's island.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        rank: int,
        outer: OuterLoop,
        *,
        omit_frozen_base: bool = False,
    ) -> None:
        super().__init__(model, optimizer, rank, omit_frozen_base=omit_frozen_base)
        self._outer = outer

    @override
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizer state and the outer state of this rank's slices (see the module's docstring)."""
        super().restore(checkpoint)
        slices, tensors = self._slices(), checkpoint.manifest.tensors
        prefix = own_prefix(checkpoint.manifest, self._outer.index, self._outer.num_islands)

        def read(section: str, name: str) -> torch.Tensor | None:
            for path in (f"{section}/{name}", f"{prefix}{section}/{name}"):
                if path in tensors:
                    return read_for_resume(checkpoint, path, *slices[name])
            return None

        self._outer.load_tensors(read)

    @override
    def _restored_prefixes(self, manifest: Manifest) -> list[str]:
        prefix = own_prefix(manifest, self._outer.index, self._outer.num_islands)
        return [prefix] if prefix else super()._restored_prefixes(manifest)

    @override
    def _model_ranges(self) -> Iterator[TensorRange]:
        if self._outer.index:
            return
        parameters = self._outer.tensors()[MODEL]
        for tensor_range in super()._model_ranges():
            name = tensor_range.path.removeprefix(f"{MODEL}/")
            yield tensor_range._replace(tensor=parameters.get(name, tensor_range.tensor))

    @override
    def _slice_state(self, prefix: str = "") -> Iterator[tuple[str, str, torch.Tensor]]:
        prefix = island_prefix(self._outer.index)
        sections: dict[str, dict[str, torch.Tensor]] = {f"{prefix}{MODEL}": dict(self._model.named_shard_parameters())}
        for section, tensors in self._outer.tensors().items():
            if section == "residual":
                sections[f"{prefix}{section}"] = tensors
            elif section != MODEL and self._outer.index == 0:
                sections[section] = tensors
        for section, tensors in sections.items():
            yield from ((section, name, tensor) for name, tensor in tensors.items() if tensor.numel())
        yield from super()._slice_state(prefix)


def own_prefix(manifest: Manifest, island: int, num_islands: int) -> str:
    """Return the prefix of an island's paths if a checkpoint has as many islands as the run, otherwise ""."""
    return island_prefix(island) if manifest.num_islands == num_islands else ""


def make_training_state(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    outer: OuterLoop | None,
    *,
    omit_frozen_base: bool = False,
) -> TrainingState:
    """Return the training state of a run with or without an outer optimizer. `rank` is the rank in the job."""
    if outer is None:
        return TrainingState(model, optimizer, rank, omit_frozen_base=omit_frozen_base)
    return IslandTrainingState(model, optimizer, rank, outer, omit_frozen_base=omit_frozen_base)
