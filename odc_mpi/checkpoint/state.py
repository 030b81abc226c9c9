"""Saving and restoring the state of a model and its optimizer. Does not communicate.

    snapshot    copy this rank's slices to host memory, from which a thread writes them
    restore     read this rank's slices from a checkpoint, which a different number of ranks may have written

The state consists of the parameters in master precision, the optimizer state, and the tensors that are replicated on
all ranks, such as persistent buffers. Rank 0 stores the replicated tensors. Frozen parameters of a base model are
omitted; the checkpoint's `metadata["base"]` describes the base model.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

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
#: Optimizer state of slices by parameter name, then by key: the dtype of a tensor with one number per element, or the
#: value of a number.
StateRecords: TypeAlias = dict[str, dict[str, str | float]]


class _TensorRange(NamedTuple):
    """Range of a flattened tensor in memory that is stored as `path`. `shape` is the shape of the full tensor."""

    path: str
    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]


class TrainingState:
    """This rank's part of the state of a model and its optimizer.

    If `omit_frozen_base` is True, frozen parameters are omitted, because they belong to a base model.
    """

    def __init__(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int, *, omit_frozen_base: bool = False
    ) -> None:
        self._model = model
        self._omit_frozen_base = omit_frozen_base
        self._optimizer = optimizer
        self._rank = rank
        # Reused: writing to fresh pages takes longer than the copy.
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def snapshot(self) -> list[ShardEntry]:
        """Copy this rank's part of the state to host memory, and return it as entries for this rank's file.

        Call this after the parameters are published. Each call overwrites the arrays that the previous call returned.
        """
        return [self._copy(tensor_range) for tensor_range in self._tensor_ranges() if tensor_range.tensor.numel()]

    def local_ranges(self) -> dict[str, tuple[int, npt.NDArray]]:
        """Map the path of each tensor to this rank's range of it: the start, and the elements in the stored type.

        For tensors in host memory, the arrays are views, so their values change with the next optimizer step.
        """
        return {
            tensor_range.path: (tensor_range.start, _stored(tensor_range.tensor.detach().cpu().contiguous()))
            for tensor_range in self._tensor_ranges()
            if tensor_range.tensor.numel()
        }

    def state_records(self) -> StateRecords:
        """Describe the optimizer state for this rank's slices. Other ranks own the state for other parameters."""
        return {
            name: {key: _name(value.dtype) if value.dim() else float(value) for key, value in state}
            for name, parameter in self._model.named_shard_parameters()
            if (state := list(self._optimizer_state(name, parameter)))
        }

    def make_manifest(self, step: int, metadata: dict[str, object], records: Iterable[StateRecords]) -> Manifest:
        """Return the manifest of the current state, without file records.

        The manifest is complete only on rank 0; other ranks omit the replicated tensors. `step` is the number of
        completed training steps. `metadata` must be JSON-serializable. `records` are the `state_records` of all ranks.
        """
        tensors: dict[str, TensorRecord] = {}
        for path, tensor, _, shape in self._model_ranges():
            buffer = ("buffer", ((0, 0, tensor.numel()),) if tensor.numel() else ())
            kind, ranges = self._kinds_and_ranges.get(path.removeprefix(f"{MODEL}/"), buffer)
            tensors[path] = TensorRecord(kind, _name(tensor.dtype), shape, ranges)
        scalars: dict[str, dict[str, float]] = {}
        for name, state in (item for record in records for item in record.items()):
            _, ranges = self._kinds_and_ranges[name]
            for key, value in state.items():
                if isinstance(value, str):
                    shape = tensors[f"{MODEL}/{name}"].shape
                    tensors[f"{OPTIMIZER}/{key}/{name}"] = TensorRecord("state", value, shape, ranges)
                else:
                    scalars.setdefault(key, {})[name] = value
        size = self._model.layouts[0].num_owners
        return Manifest(step, size, tensors, scalars, type(self._optimizer).__name__, metadata)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizer state of this rank's slices from a checkpoint.

        Parameters are not restored; `CheckpointWeights` reads them. Raises `UserError` if the checkpoint was saved with
        a different optimizer class, or is damaged.
        """
        manifest = checkpoint.manifest
        require_optimizer(checkpoint, type(self._optimizer).__name__)
        keys = {path.split("/", 2)[1] for path, record in manifest.tensors.items() if record.kind == "state"}
        slices = {tensor_slice.spec.name: tensor_slice for tensor_slice, _ in self._model.slices()}
        for name, parameter in self._model.named_shard_parameters():
            if not parameter.numel():
                continue
            state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
            for key in sorted(keys):
                path = f"{OPTIMIZER}/{key}/{name}"
                if path in manifest.tensors:
                    stored = _resume_tensor(checkpoint, path, slices[name].start, slices[name].stop)
                    state[key] = stored.to(parameter.device)
            for key, values in manifest.scalars.items():
                if name in values:
                    state[key] = torch.tensor(values[name], dtype=torch.get_default_dtype())
            if not state:
                del self._optimizer.state[parameter]

    def _tensor_ranges(self) -> Iterator[_TensorRange]:
        yield from self._model_ranges()
        slices = {tensor_slice.spec.name: tensor_slice for tensor_slice, _ in self._model.slices()}
        for name, parameter in self._model.named_shard_parameters():
            for key, value in self._optimizer_state(name, parameter):
                if value.dim():
                    yield _TensorRange(f"{OPTIMIZER}/{key}/{name}", value, slices[name].start, slices[name].spec.shape)

    def _model_ranges(self) -> Iterator[_TensorRange]:
        for tensor_slice, tensor in self._model.slices():
            spec = tensor_slice.spec
            if spec.requires_grad or not self._omit_frozen_base:
                yield _TensorRange(f"{MODEL}/{spec.name}", tensor, tensor_slice.start, spec.shape)
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
                    f"{type(self._optimizer).__name__} has state {key} of shape {list(value.shape)} for a slice of "
                    f"{name} with {parameter.numel()} elements: a checkpoint can hold one number per element, or one "
                    "number in all"
                )
            yield key, value

    @cached_property
    def _kinds_and_ranges(self) -> dict[str, tuple[str, tuple[tuple[int, int, int], ...]]]:
        """Kind of each parameter, and rank, start and stop of each of its non-empty slices, keyed by parameter name."""
        return {
            whole.spec.name: ("trainable" if layout.trainable else "frozen", layout.owners(whole))
            for layout in self._model.layouts
            for whole in layout.ranges
        }

    def _copy(self, original: _TensorRange) -> ShardEntry:
        path, tensor = original.path, original.tensor
        copy = self._copies.get(path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[path] = torch.empty_like(tensor, device="cpu")
        copy.copy_(tensor)
        return ShardEntry(path, _stored(copy), original.start, original.shape, _name(tensor.dtype))


class CheckpointWeights:
    """`WeightSource` that reads parameters from an open checkpoint, or from `base` if the checkpoint lacks them."""

    def __init__(self, checkpoint: Checkpoint, base: WeightSource | None = None) -> None:
        self._checkpoint = checkpoint
        self._base = base

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements `[start, stop)` of the flattened parameter `name`. Raise `UserError` if they are damaged."""
        if self._base is not None and f"{MODEL}/{name}" not in self._checkpoint.manifest.tensors:
            return self._base.read(name, start, stop)
        return _resume_tensor(self._checkpoint, f"{MODEL}/{name}", start, stop)


@torch.no_grad()
def restore_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Restore the replicated tensors of a module: persistent buffers and non-floating-point parameters."""
    for name, tensor in replicated_persistent_tensors(module):
        tensor.copy_(_resume_tensor(checkpoint, f"{MODEL}/{name}", 0, tensor.numel()).reshape(tensor.shape))


def require_model(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Raise `UserError` unless a checkpoint and a module have the same tensors, with equal names, shapes and kinds."""
    expected = {
        name: (tuple(p.shape), "trainable" if p.requires_grad else "frozen")
        for name, p in module.named_parameters()
        if p.is_floating_point() and (p.requires_grad or "base" not in checkpoint.manifest.metadata)
    }
    expected |= {name: (tuple(tensor.shape), "buffer") for name, tensor in replicated_persistent_tensors(module)}
    saved = {
        path.removeprefix(f"{MODEL}/"): (record.shape, record.kind)
        for path, record in checkpoint.manifest.tensors.items()
        if record.kind != "state"
    }
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            here, there = (_format_shape(tensors.get(name)) for tensors in (expected, saved))
            raise UserError(
                f"the checkpoint {checkpoint.directory} is of another model: {name} is {there} there, {here} in "
                f"this one: change model.*, or set run.resume to never, or run.dir"
            )


def require_optimizer(checkpoint: Checkpoint, name: str) -> None:
    """Raise `UserError` unless a checkpoint was saved with the optimizer class `name`."""
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
    """Read elements `[start, stop)` of a flattened tensor, in the dtype in which the tensor was saved.

    `path` is the path of a data set, such as model/layers.0.weight. Raises `UserError` if the elements are damaged.
    """
    dtype = getattr(torch, checkpoint.record(path).dtype)
    return torch.from_numpy(checkpoint.read(path, start, stop)).view(dtype)
