"""The state of a model and its optimizer: into a checkpoint and back.

    snapshot    copies this rank's slices; training waits for nothing else
    restore     reads this rank's slices, whatever the number of ranks that wrote the checkpoint

The state is: parameters in master precision, frozen ones too unless they belong to a base that the checkpoint only
refers to (`about["base"]`); the optimizer's state of each element; persistent buffers and other tensors that every rank
has whole, which rank 0 stores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy.typing as npt
import torch
from torch import nn

from odc_mpi.checkpoint.manifest import Manifest, TensorRecord
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.shard_file import ShardEntry, stored_type
from odc_mpi.errors import UserError
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import replicated_persistent_tensors

MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True)
class _TensorRange:
    """A range of a tensor of the running training."""

    path: str
    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]


class TrainingState:
    """The state of a model and its optimizer on this rank.

    Args:
        model: The model.
        optimizer: The optimizer of all or some of its slices.
        rank: This rank.
        omit_frozen_base: Whether frozen parameters are those of a base, which a checkpoint does not hold.
    """

    def __init__(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int, *, omit_frozen_base: bool = False
    ) -> None:
        self._model = model
        self._omit_frozen_base = omit_frozen_base
        self._optimizer = optimizer
        self._rank = rank
        # The memory is kept: writing to fresh pages takes longer than the copy.
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def snapshot(self) -> list[ShardEntry]:
        """Copy this rank's part of the state. Local; call after point B. Overwrites the result of an earlier call."""
        return [self._copy(live) for live in self._tensor_ranges() if live.tensor.numel()]

    def parts(self) -> dict[str, tuple[int, npt.NDArray]]:
        """Return this rank's part of each tensor: its first element, and its elements in the stored type.

        Views of what is on the host, which change from point A to B.
        """
        live = {live.path: live for live in self._tensor_ranges()}
        return {
            path: (tensor_range.start, _stored(tensor_range.tensor.detach().cpu().contiguous()))
            for path, tensor_range in live.items()
            if tensor_range.tensor.numel()
        }

    def describe(self, step: int, metadata: dict[str, object]) -> Manifest:
        """Return the manifest of a snapshot of the present state, without its files."""
        tensors: dict[str, TensorRecord] = {}
        ranges, kinds = self._ranges, self._kinds
        for live in self._tensor_ranges():
            parameter = live.path.split("/", 2 if live.path.startswith(OPTIMIZER) else 1)[-1]
            of = ranges.get(parameter, ((0, 0, live.tensor.numel()),) if live.tensor.numel() else ())
            kind = "state" if live.path.startswith(OPTIMIZER) else kinds.get(parameter, "buffer")
            tensors[live.path] = TensorRecord(kind, _name(live.tensor.dtype), live.shape, of)
        size = self._model.layouts[0].num_owners
        return Manifest(step, size, tensors, self._scalars(), type(self._optimizer).__name__, metadata)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizer's state of this rank's slices. Local; parameters are read by `CheckpointWeights`.

        Raises:
            UserError: The checkpoint is damaged, or of another optimizer.
        """
        manifest = checkpoint.manifest
        require_optimizer(checkpoint, type(self._optimizer).__name__)
        keys = {path.split("/", 2)[1] for path, record in manifest.tensors.items() if record.kind == "state"}
        local_ranges = {tensor_slice.spec.name: tensor_slice for tensor_slice, _ in self._model.slices()}
        for name, parameter in self._model.named_shard_parameters():
            state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
            for key in sorted(keys):
                path = f"{OPTIMIZER}/{key}/{name}"
                if path in manifest.tensors:
                    stored = _resume_tensor(checkpoint, path, local_ranges[name].start, local_ranges[name].stop)
                    state[key] = stored.to(parameter.device)
            for key, values in manifest.scalars.items():
                if name in values:
                    state[key] = torch.tensor(values[name], dtype=torch.get_default_dtype())
            if not state:
                del self._optimizer.state[parameter]

    def _tensor_ranges(self) -> Iterator[_TensorRange]:
        for tensor_slice, tensor in self._model.slices():
            if tensor_slice.spec.requires_grad or not self._omit_frozen_base:
                yield _TensorRange(
                    f"{MODEL}/{tensor_slice.spec.name}", tensor, tensor_slice.start, tensor_slice.spec.shape
                )
        slices = {tensor_slice.spec.name: tensor_slice for tensor_slice, _ in self._model.slices()}
        for name, parameter in self._model.named_shard_parameters():
            for key, value in self._optimizer_state(name, parameter):
                if value.dim():
                    tensor_slice = slices[name]
                    yield _TensorRange(f"{OPTIMIZER}/{key}/{name}", value, tensor_slice.start, tensor_slice.spec.shape)
        if self._rank == 0:
            for name, tensor in replicated_persistent_tensors(self._model.module):
                yield _TensorRange(f"{MODEL}/{name}", tensor.detach().reshape(-1), 0, tuple(tensor.shape))

    def _optimizer_state(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
            if value.dim() and value.shape != parameter.shape:
                raise UserError(
                    f"{type(self._optimizer).__name__} keeps {key} of shape {list(value.shape)} for a slice of {name} "
                    f"of {parameter.numel()} elements: a checkpoint holds what is kept of each element, or one number"
                )
            yield key, value

    def _scalars(self) -> dict[str, dict[str, float]]:
        scalars: dict[str, dict[str, float]] = {}
        for name, parameter in self._model.named_shard_parameters():
            for key, value in self._optimizer_state(name, parameter):
                if not value.dim():
                    scalars.setdefault(key, {})[name] = float(value)
        return scalars

    @cached_property
    def _ranges(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """Return the ranges of every parameter, each with the rank that holds it."""
        ranges: dict[str, list[tuple[int, int, int]]] = {}
        for layout in self._model.layouts:
            for rank in range(layout.num_owners):
                for tensor_slice in layout.slices(rank):
                    ranges_of_tensor = ranges.setdefault(tensor_slice.spec.name, [])
                    if tensor_slice.numel:
                        ranges_of_tensor.append((rank, tensor_slice.start, tensor_slice.stop))
        return {name: tuple(ranges_of_tensor) for name, ranges_of_tensor in ranges.items()}

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {
            slot.spec.name: "trainable" if layout.trainable else "frozen"
            for layout in self._model.layouts
            for slot in layout.ranges
        }

    def _copy(self, live: _TensorRange) -> ShardEntry:
        copy = self._copies.get(live.path)
        if copy is None or copy.shape != live.tensor.shape or copy.dtype != live.tensor.dtype:
            copy = self._copies[live.path] = torch.empty_like(live.tensor, device="cpu")
        copy.copy_(live.tensor)
        return ShardEntry(live.path, _stored(copy), live.start, live.shape, _name(live.tensor.dtype))


class CheckpointWeights:
    """Initial parameters from a checkpoint: a `shard.local_shards.WeightSource`. Local; each rank reads its own slices.

    Args:
        checkpoint: The checkpoint; it stays open while weights are read.
        base: Where parameters come from that belong to the base of the checkpoint's adapters.
    """

    def __init__(self, checkpoint: Checkpoint, base: WeightSource | None = None) -> None:
        self._checkpoint = checkpoint
        self._base = base

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        if self._base is not None and f"{MODEL}/{name}" not in self._checkpoint.manifest.tensors:
            return self._base.read(name, start, stop)
        return _resume_tensor(self._checkpoint, f"{MODEL}/{name}", start, stop)


@torch.no_grad()
def restore_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill the tensors that every rank has whole: persistent buffers and non-floating-point parameters."""
    for name, tensor in replicated_persistent_tensors(module):
        tensor.copy_(_resume_tensor(checkpoint, f"{MODEL}/{name}", 0, tensor.numel()).reshape(tensor.shape))


def require_model(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Check that a checkpoint is of this model, which may be on the meta device.

    Raises:
        UserError: Names, shapes, or which parameters are trained differ.
    """
    expected = {
        name: (tuple(p.shape), "trainable" if p.requires_grad else "frozen")
        for name, p in module.named_parameters()
        if p.is_floating_point() and (p.requires_grad or "base" not in checkpoint.manifest.metadata)
    }
    expected |= {name: (tuple(tensor.shape), "buffer") for name, tensor in replicated_persistent_tensors(module)}
    found = {
        path.removeprefix(f"{MODEL}/"): (record.shape, record.kind)
        for path, record in checkpoint.manifest.tensors.items()
        if record.kind != "state"
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            ours, theirs = (_format_shape(tensors.get(name)) for tensors in (expected, found))
            raise UserError(
                f"the checkpoint {checkpoint.directory} is of another model: {name} is {theirs} there, {ours} in "
                f"this one: change model.*, or set run.resume to never, or run.dir"
            )


def require_optimizer(checkpoint: Checkpoint, name: str) -> None:
    """Check that a checkpoint is of an optimizer of this class.

    Raises:
        UserError: The checkpoint is of another optimizer.
    """
    if checkpoint.manifest.optimizer != name:
        raise UserError(
            f"the checkpoint {checkpoint.directory} is of the optimizer {checkpoint.manifest.optimizer}, got {name}: "
            "change optim.optimizer, or set run.resume to never, or run.dir"
        )


def _format_shape(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored(tensor: torch.Tensor) -> npt.NDArray:
    return tensor.view(torch.uint8).numpy().view(stored_type(_name(tensor.dtype)))


def _resume_tensor(checkpoint: Checkpoint, path: str, start: int, stop: int) -> torch.Tensor:
    try:
        return read_tensor(checkpoint, path, start, stop)
    except UserError as error:
        raise UserError(
            f"{error}: set run.resume to an older checkpoint, or remove {checkpoint.directory} and start again"
        ) from error


def read_tensor(checkpoint: Checkpoint, path: str, start: int, stop: int) -> torch.Tensor:
    """Read elements `[start, stop)` of a flattened tensor, in its own type.

    Raises:
        UserError: The elements are damaged.
    """
    dtype = getattr(torch, checkpoint.record(path).dtype)
    return torch.from_numpy(checkpoint.read(path, start, stop)).view(dtype)
