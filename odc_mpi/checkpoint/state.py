"""Saving and restoring the state of a model and its optimizer. Does not communicate.

The state consists of the parameters in master precision, the optimizer state, and the tensors that are replicated on
all ranks, such as persistent buffers. Rank 0 stores the replicated tensors. Frozen parameters of a base model are
omitted; the checkpoint's `metadata["base"]` describes the base model. Callbacks may add sections with tensors that have
the shapes of the slices, and may replace the parameters in the section `model`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy.typing as npt
import torch
from torch import nn

from odc_mpi.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, StateRecords, TensorRecord, add_state
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.shard_file import ShardEntry, stored_type
from odc_mpi.errors import UserError
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import is_sharded, replicated_persistent_tensors

#: Section of a checkpoint with the parameters that are trained, if they differ from those in `model`.
LOCAL = "local"


class TensorRange(NamedTuple):
    """Elements of a flattened tensor, `[n]`, from `start` on, stored as `path`. `shape` is the full tensor's shape."""

    path: str
    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]


class TrainingState:
    """This rank's part of the state of a model and of its optimizer.

    If `omit_frozen_base` is True, frozen parameters are omitted, because they belong to a base model. `tensors` returns
    further tensors to save, by section and parameter name (see `Callback.tensors`).
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        rank: int,
        *,
        omit_frozen_base: bool = False,
        tensors: Callable[[], Mapping[str, Mapping[str, torch.Tensor]]] = dict,
    ) -> None:
        self._model, self._optimizer, self._rank = model, optimizer, rank
        self._omit_frozen_base, self._tensors = omit_frozen_base, tensors
        # Reused: writing to fresh pages takes longer than the copy.
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def snapshot(self) -> list[ShardEntry]:
        """Copy this rank's part of the state to host memory, and return it as entries for this rank's file.

        Call this after the parameters are published. Each call overwrites the arrays that the previous call returned.
        """
        return [self._copy(tensor_range) for tensor_range in self.tensor_ranges() if tensor_range.tensor.numel()]

    def state_records(self) -> StateRecords:
        """Return records of all state other than model tensors, for each parameter of which this rank owns a slice."""
        records: StateRecords = {}
        for section, name, value in self._slice_state():
            records.setdefault(section, {})[name] = _name(value.dtype) if value.dim() else float(value)
        return records

    def make_manifest(self, step: int, metadata: dict[str, object], records: Sequence[StateRecords]) -> Manifest:
        """Return the manifest of the current state after `step` steps, without file records.

        The manifest is complete only on rank 0, because only rank 0 has the replicated tensors. `metadata` must be
        JSON-serializable. `records` contains each rank's `state_records`, in rank order.
        """
        tensors: dict[str, TensorRecord] = {}
        for path, tensor, _, shape in self._model_ranges():
            buffer = ("buffer", ((0, 0, tensor.numel()),) if tensor.numel() else ())
            kind, ranges = self._kinds_and_ranges.get(path.removeprefix(f"{MODEL}/"), buffer)
            tensors[path] = TensorRecord(kind, _name(tensor.dtype), shape, ranges)
        manifest = Manifest(step, len(records), tensors, {}, type(self._optimizer).__name__, metadata)
        return add_state(manifest, records)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizer state, but not the parameters, of this rank's slices from a checkpoint.

        The optimizer must have the class with which it was saved. Raises `UserError` if the checkpoint is damaged.
        """
        prefix = f"{OPTIMIZER}/"
        keys = {path.split("/")[1] for path in checkpoint.manifest.tensors if path.startswith(prefix)}
        for name, parameter in self._model.named_shard_parameters():
            if not parameter.numel():
                continue
            state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
            for key in sorted(keys):
                if (values := self.read(checkpoint, f"{prefix}{key}", name)) is not None:
                    state[key] = values.to(parameter.device)
            for key, numbers in sorted(checkpoint.manifest.scalars.items()):
                if name in numbers:
                    state[key] = torch.tensor(numbers[name], dtype=torch.get_default_dtype())
            if not state:
                del self._optimizer.state[parameter]

    def read(self, checkpoint: Checkpoint, section: str, name: str) -> torch.Tensor | None:
        """Read this rank's slice of a parameter's tensor in a section. Return None if the checkpoint lacks it."""
        path = f"{section}/{name}"
        return read_for_resume(checkpoint, path, *self._slices[name]) if path in checkpoint.manifest.tensors else None

    def tensor_ranges(self) -> Iterator[TensorRange]:
        """Yield this rank's range of each tensor, which may be empty. The values change in the next optimizer step."""
        yield from self._model_ranges()
        shapes = self._model.parameter_shapes()
        for section, name, value in self._slice_state():
            if value.dim():
                yield TensorRange(f"{section}/{name}", value, self._slices[name][0], shapes[name])

    @cached_property
    def _slices(self) -> dict[str, tuple[int, int]]:
        """Map the name of each parameter to the start and stop of this rank's slice."""
        return {part.spec.name: (part.start, part.stop) for part, _ in self._model.slices()}

    @cached_property
    def _of_other_nodes(self) -> set[str]:
        """Frozen parameters that the ranks of the first node save, which have all of them, as this node has."""
        layouts = [layout for layout in self._model.layouts if layout.node_ranks and 0 not in layout.node_ranks]
        return {parameter.spec.name for layout in layouts for parameter in layout.ranges}

    def _model_ranges(self) -> Iterator[TensorRange]:
        replaced = self._tensors().get(MODEL, {})
        for tensor_slice, tensor in self._model.slices():
            spec = tensor_slice.spec
            if spec.requires_grad or not (self._omit_frozen_base or spec.name in self._of_other_nodes):
                yield TensorRange(
                    f"{MODEL}/{spec.name}", replaced.get(spec.name, tensor), tensor_slice.start, spec.shape
                )
        if self._rank == 0:
            for name, tensor in replicated_persistent_tensors(self._model.module):
                yield TensorRange(f"{MODEL}/{name}", tensor.detach().reshape(-1), 0, tuple(tensor.shape))

    def _slice_state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the state of this rank's slices: path without the name, parameter name, and values or one number."""
        for section, tensors in self._tensors().items():
            if section != MODEL:
                yield from ((section, name, tensor) for name, tensor in tensors.items() if tensor.numel())
        for name, parameter in self._model.named_shard_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
                assert not value.dim() or value.shape == parameter.shape, f"state {key} of shape {value.shape}"
                yield f"{OPTIMIZER}/{key}", name, value

    @cached_property
    def _kinds_and_ranges(self) -> dict[str, tuple[str, tuple[tuple[int, int, int], ...]]]:
        """Kind of each parameter, and rank, start and stop of each of its non-empty slices, keyed by parameter name."""
        return {
            parameter.spec.name: ("trainable" if layout.trainable else "frozen", layout.owners(parameter))
            for layout in self._model.layouts
            for parameter in layout.ranges
        }

    def _copy(self, original: TensorRange) -> ShardEntry:
        path, tensor = original.path, original.tensor
        copy = self._copies.get(path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[path] = torch.empty_like(tensor, device="cpu")
        copy.copy_(tensor)
        return ShardEntry(path, stored_array(copy), original.start, original.shape, _name(tensor.dtype))


class CheckpointWeights:
    """`WeightSource` that reads parameters from an open checkpoint, or from `base` if the checkpoint lacks them.

    If `continues` is True, trained parameters come from the section `local`, if the checkpoint has it.
    """

    def __init__(self, checkpoint: Checkpoint, base: WeightSource | None = None, *, continues: bool = False) -> None:
        self._checkpoint, self._base, self._continues = checkpoint, base, continues

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements `[start, stop)` of the flattened parameter `name`. Raise `UserError` if they are damaged."""
        tensors, path = self._checkpoint.manifest.tensors, f"{MODEL}/{name}"
        if self._base is not None and path not in tensors:
            return self._base.read(name, start, stop)
        local = f"{LOCAL}/{name}"
        return read_for_resume(self._checkpoint, local if self._continues and local in tensors else path, start, stop)


@torch.no_grad()
def restore_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Restore the replicated tensors of a module: persistent buffers and non-floating-point parameters."""
    for name, tensor in replicated_persistent_tensors(module):
        tensor.copy_(read_for_resume(checkpoint, f"{MODEL}/{name}", 0, tensor.numel()).reshape(tensor.shape))


def require_model(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Raise `UserError` if tensor names, shapes or kinds differ. A base model's frozen tensors are not compared."""
    expected = {
        name: (tuple(p.shape), "trainable" if p.requires_grad else "frozen")
        for name, p in module.named_parameters()
        if is_sharded(p) and (p.requires_grad or "base" not in checkpoint.manifest.metadata)
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
                f"this one: change model.*; or to start over, set run.resume to never and choose another run.dir"
            )


def _format_shape(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_array(tensor: torch.Tensor) -> npt.NDArray:
    """Return a contiguous host tensor, `[n]`, as an array of the stored type that shares its memory."""
    return tensor.view(torch.uint8).numpy().view(stored_type(_name(tensor.dtype)))


def read_for_resume(checkpoint: Checkpoint, path: str, start: int, stop: int) -> torch.Tensor:
    """Read elements like `read_tensor`, but make a `UserError` also explain how to start without the checkpoint."""
    try:
        return read_tensor(checkpoint, path, start, stop)
    except UserError as error:
        raise UserError(
            f"{error}: if odc-mpi checkpoint verify confirms it, set run.resume to an older checkpoint, or move "
            f"{checkpoint.directory} elsewhere and start again"
        ) from error


def read_tensor(checkpoint: Checkpoint, path: str, start: int, stop: int) -> torch.Tensor:
    """Read elements `[start, stop)` of a flattened tensor in the dtype in which the tensor was saved.

    `path` is the path of a dataset, such as model/layers.0.weight. Raises `UserError` if the elements are damaged.
    """
    dtype = getattr(torch, checkpoint.record(path).dtype)
    return torch.from_numpy(checkpoint.read(path, start, stop)).view(dtype)
