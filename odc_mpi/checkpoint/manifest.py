"""The manifest of a checkpoint: its tensors, its files, and their checksums.

A checkpoint is a directory `step_00000100`. It exists if and only if its manifest.json is there and intact: it is
written last. The manifest holds a checksum of each file without its tensors. This checksum covers the file's own table
of checksums of the tensors, block by block: so every byte is covered, and rank 0 does not read other ranks' files.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError, one_line_message

FORMAT, VERSION = "odc_mpi.checkpoint", 3
MANIFEST, INDEX = "manifest.json", "index.h5"
#: The directory of checkpoints in a run directory.
CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step_(\d{8,})")

#: The stored type of each torch type, as numpy names it. HDF5 knows neither bf16 nor fp8: these are kept as plain bits.
STORED_AS = {
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "<u2",
    "bool": "<u1",
    "float8_e4m3fn": "<u1",
    "float8_e5m2": "<u1",
}


class VersionError(UserError):
    """A checkpoint of another version of the format, which may be intact."""


@dataclass(frozen=True)
class TensorRecord:
    """A tensor and the ranks that hold its parts.

    Attributes:
        kind: trainable or frozen, a parameter; buffer, what is not sharded; state, of the optimizer.
        dtype: Type, as torch names it.
        shape: Shape of the whole tensor.
        ranges: Rank, first and one past the last element of the flattened tensor; in order, none empty.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileRecord:
    """The length of a file, and the CRC-32 of all its bytes except those of tensors."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: Steps that were done.
        size: Number of ranks that wrote the checkpoint.
        tensors: Tensors by path of their data sets, such as model/layers.0.weight, optimizer/exp_avg/layers.0.weight.
        scalars: Optimizer state of one number for each parameter, such as its steps, by name and parameter.
        optimizer: Name of the optimizer's class.
        metadata: Other values for JSON: the run's configuration, the position in the data, versions.
        files: Files by name.
    """

    step: int
    size: int
    tensors: Mapping[str, TensorRecord]
    scalars: Mapping[str, Mapping[str, float]]
    optimizer: str
    metadata: Mapping[str, Any]
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def shard_name(step: int, rank: int) -> str:
    """Return the name of a rank's file.

    The name contains the step because HDF5 also looks for a missing file of an index in the current directory, which
    may be another checkpoint.
    """
    return f"{step_name(step)}_rank_{rank:05d}.h5"


def step_name(step: int) -> str:
    """Return the name of the directory of a step."""
    return f"step_{step:08d}"


def steps_in(directory: Path) -> dict[int, Path]:
    """Return the directories named as checkpoints, by step, the oldest first."""
    if not directory.is_dir():
        return {}
    found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest and flush it to the disk."""
    # Checksum of the content as a reader gets it: JSON turns numeric keys into text, which sorts differently.
    body = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}))
    document = {**body, "checksum": _checksum(body)}
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        UserError: The manifest is missing, damaged, or of another version.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UserError(f"{path} is no manifest of a checkpoint of odc_mpi")
        if body.get("version") != VERSION:
            raise VersionError(
                f"{path}: expected version {VERSION} of the format, got {body.get('version')}: another version of "
                "odc_mpi wrote it, which can read it"
            )
        if body.pop("checksum", None) != _checksum(body):
            raise UserError(f"{path} is damaged: its checksum does not fit")
        return _from_json(body)
    except FileNotFoundError as error:
        raise UserError(f"{directory} is no complete checkpoint: it has no {MANIFEST}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {one_line_message(error)}") from error


def _from_json(body: Mapping[str, Any]) -> Manifest:
    tensors = {
        path: TensorRecord(
            record["kind"], record["dtype"], tuple(record["shape"]), tuple(tuple(part) for part in record["ranges"])
        )
        for path, record in body["tensors"].items()
    }
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    names = ("step", "size", "scalars", "optimizer", "metadata")
    return Manifest(tensors=tensors, files=files, **{name: body[name] for name in names})


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
