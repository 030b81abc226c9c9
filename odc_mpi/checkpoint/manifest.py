"""The manifest of a checkpoint: records of its tensors and files, with checksums.

A checkpoint is a directory such as `step_00000100`. It is complete if it has an intact manifest.json, which is written
last. For each file, the manifest contains a checksum of all bytes except tensor data. These bytes include a table of
checksums for blocks of tensor data, so every byte is covered by a checksum although rank 0 does not read the files of
other ranks.

The digest of a checkpoint covers the names, dtypes, shapes and bits of parameters, buffers and optimizer state. It does
not depend on the number of ranks, the configuration, the position in the data, or software versions.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import parse_json, sync

FORMAT, VERSION = "odc_mpi.checkpoint", 3
MANIFEST, INDEX = "manifest.json", "index.h5"
#: Name of the subdirectory of a run directory that contains the checkpoints.
CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step_(\d{8,})")

#: Sections of a checkpoint.
MODEL, OPTIMIZER = "model", "optimizer"
#: Records of the state of slices, keyed by path without the name, such as optimizer/exp_avg, then by parameter name. A
#: record is the name of the dtype for a tensor with one number per element, or the value for a single number.
StateRecords: TypeAlias = dict[str, dict[str, str | float]]

#: NumPy type in which each torch dtype is stored. HDF5 lacks bf16 and fp8, so their bits are stored as integers.
STORED_AS = {
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "<u2",
    "bool": "<u1",
    "float8_e4m3fn": "<u1",
    "float8_e5m2": "<u1",
}
#: Maximum number of tensor elements that are read at once to compute a digest.
BLOCK_NUMEL = 1 << 22
#: Kinds of tensors (see `TensorRecord`).
KINDS = ("trainable", "frozen", "buffer", "state")


class VersionError(UserError):
    """Raised if the format version of a checkpoint is not `VERSION`. The checkpoint may be intact."""


@dataclass(frozen=True)
class TensorRecord:
    """Kind, name of the torch dtype, and full shape of a tensor, and its ranges in the ranks' files.

    The kind is "trainable" or "frozen" for a parameter, "buffer" for a replicated tensor, and "state" for optimizer
    state. A range is a tuple `(rank, start, stop)`, whose bounds are positions in the flattened tensor. No range is
    empty, and together the ranges cover the tensor in order.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def numel(self) -> int:
        """Number of elements in the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the CRC-32 of all of its bytes except tensor data."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint that was saved by `size` ranks after `step` training steps.

    Attributes:
        tensors: Records of the tensors, keyed by the paths of their datasets, such as model/layers.0.weight or
            optimizer/exp_avg/layers.0.weight.
        scalars: Optimizer state with one number per parameter, such as `scalars["step"]["layers.0.weight"]`.
        optimizer: Name of the optimizer class.
        metadata: JSON-serializable values such as the run's configuration, position in the data and software versions.
        files: Records of all ranks' files and of the index, if there is one, keyed by file name.
    """

    step: int
    size: int
    tensors: Mapping[str, TensorRecord]
    scalars: Mapping[str, Mapping[str, float]]
    optimizer: str
    metadata: Mapping[str, Any]
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def add_state(manifest: Manifest, records: Sequence[StateRecords]) -> Manifest:
    """Return a manifest of model tensors with the state of all ranks' slices, given each rank's records."""
    tensors, scalars = dict(manifest.tensors), dict[str, dict[str, float]]()
    for record in records:
        for section, by_name in record.items():
            for name, value in by_name.items():
                if isinstance(value, str):
                    parameter = tensors[f"{MODEL}/{name}"]
                    tensors[f"{section}/{name}"] = TensorRecord("state", value, parameter.shape, parameter.ranges)
                else:
                    scalars.setdefault(section.removeprefix(f"{OPTIMIZER}/"), {})[name] = value
    return replace(manifest, tensors=tensors, scalars=scalars)


def shard_name(step: int, rank: int) -> str:
    """Return the name of a rank's file in a step's checkpoint."""
    # The name contains the step, because HDF5 also searches the current directory for the files of an index, and that
    # directory may be another checkpoint.
    return f"{step_name(step)}_rank_{rank:05d}.h5"


def file_attributes(step: int, rank: int, size: int) -> dict[str, str | int]:
    """Return the attributes of a rank's file in a step's checkpoint."""
    return {"format": FORMAT, "version": VERSION, "step": step, "rank": rank, "size": size}


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """Return the step of a checkpoint's directory, or 0 if it has another name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else 0


def steps_in(directory: Path) -> dict[int, Path]:
    """Map the steps of the checkpoints in a directory to their paths, oldest first. Checkpoints may be incomplete."""
    if not directory.is_dir():
        return {}
    by_step = {step_of(path): path for path in directory.iterdir() if _STEP.fullmatch(path.name)}
    return dict(sorted(by_step.items()))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest to the file `path`, and flush it to disk."""
    write_checked(path, asdict(manifest))


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a checksum, which `read_checked` reads, to the file `path`, and flush it to disk."""
    # The checksum is of the content as it is read: JSON converts numeric keys to strings, which sort differently.
    body = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **content}))
    path.write_text(json.dumps({**body, "checksum": _checksum(body)}) + "\n", encoding="utf-8")
    sync(path)


def read_checked(path: Path) -> dict[str, Any]:
    """Read JSON of `write_checked`. Raise `UserError` for damage, or `VersionError` if its version is not `VERSION`."""
    body = parse_json(path.read_bytes())
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(f"{path} is not the manifest of a checkpoint of odc_mpi")
    if body.get("version") != VERSION:
        raise VersionError(
            f"{path}: expected version {VERSION} of the format, got {body.get('version')}: read it with the "
            "version of odc_mpi that wrote it"
        )
    if body.pop("checksum", None) != _checksum(body):
        raise UserError(f"{path} is damaged: its checksum does not match")
    return body


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raise `UserError` for damage, or `VersionError` if its version is not `VERSION`."""
    path = directory / MANIFEST
    try:
        manifest = from_json(read_checked(path))
        _check(manifest)
        return manifest
    except FileNotFoundError as error:
        raise UserError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {one_line_message(error)}") from error


def from_json(body: Mapping[str, Any]) -> Manifest:
    """Convert the parsed JSON of `asdict(manifest)` to a manifest. Other content raises many types of exceptions."""
    tensors = {
        path: TensorRecord(each["kind"], each["dtype"], tuple(each["shape"]), tuple(map(tuple, each["ranges"])))
        for path, each in body["tensors"].items()
    }
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    names = ("step", "size", "scalars", "optimizer", "metadata")
    return Manifest(tensors=tensors, files=files, **{name: body[name] for name in names})


def _check(manifest: Manifest) -> None:
    """Raise `ValueError` unless a manifest has valid types, files of all ranks, and ranges that cover each tensor."""
    if type(manifest.step) is not int or type(manifest.size) is not int or not isinstance(manifest.metadata, dict):
        raise ValueError("step, size or metadata has another type")
    numbers = [number for by_parameter in manifest.scalars.values() for number in by_parameter.values()]
    if not isinstance(manifest.optimizer, str) or not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("the state of the optimizer has another type")
    shards = manifest.files.keys() - {INDEX}
    if len(shards) != manifest.size or shards != {shard_name(manifest.step, rank) for rank in range(manifest.size)}:
        raise ValueError(f"its files are not those of {manifest.size} ranks")
    if not manifest.tensors:
        raise ValueError("it has no tensors")
    for name, record in manifest.tensors.items():
        ends = [0, *(stop for _, _, stop in record.ranges)]
        if (
            record.kind not in KINDS
            or record.dtype not in STORED_AS
            or any(type(length) is not int or length < 0 for length in record.shape)
            or any(start != end or start >= stop for (_, start, stop), end in zip(record.ranges, ends, strict=False))
            or ends[-1] != record.numel
            or not {rank for rank, _, _ in record.ranges} <= set(range(manifest.size))
        ):
            raise ValueError(f"the record of {name} is inconsistent")


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def compute_digest(manifest: Manifest, read: Callable[[str, TensorRecord], Iterable[npt.NDArray]]) -> str:
    """Return the digest of a manifest's tensors and scalars as 64 hexadecimal digits.

    `read` takes a tensor's path and record, and yields the tensor's elements, in order, as arrays of the stored type.
    """
    digest = hashlib.sha256()
    for name, record in sorted(manifest.tensors.items()):
        digest.update(f"{name} {record.dtype} {list(record.shape)}\n".encode())
        for block in read(name, record):
            digest.update(block.tobytes())
    for name, values in sorted(manifest.scalars.items()):
        for parameter, value in sorted(values.items()):
            digest.update(f"{name} {parameter} {float(value).hex()}\n".encode())
    return digest.hexdigest()


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split a range of elements into blocks of at most `BLOCK_NUMEL`, and yield the start and stop of each block."""
    for first in range(start, stop, BLOCK_NUMEL):
        yield first, min(first + BLOCK_NUMEL, stop)
