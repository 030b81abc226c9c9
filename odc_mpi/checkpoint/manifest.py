"""The manifest of a checkpoint: what is in it, which files it is made of, and how to know that they are whole.

A checkpoint is a directory `step_00000100`. It exists if and only if its manifest.json is there and intact: that is
written last. The manifest holds a checksum of each file but for the tensors in it, among it the file's own table of
checksums of the tensors, block by block: so every byte is covered, and rank 0 need not see those of others.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError, in_one_line

FORMAT, VERSION = "odc_mpi.checkpoint", 2
MANIFEST, INDEX = "manifest.json", "index.h5"
#: In a run directory.
CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step_(\d{8,})")

#: How torch's types are stored, in numpy's names. HDF5 knows neither bf16 nor fp8: these are kept as plain bits.
STORED_AS = {
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "<u2",
    "bool": "<u1",
    "float8_e4m3fn": "<u1",
    "float8_e5m2": "<u1",
}


class VersionError(UserError):
    """A checkpoint that is whole, as far as can be told, and of another version of the format."""


@dataclass(frozen=True)
class TensorRecord:
    """A tensor and who holds which part of it.

    Attributes:
        kind: trainable or frozen, a parameter; buffer, what is not sharded; state, of the optimizer.
        dtype: In torch's name.
        shape: The whole.
        pieces: Rank, first and one past the last element of the flattened tensor; in order, none empty.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class FileRecord:
    """How long a file is, and the CRC-32 of all its bytes but for those of tensors."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: Steps that were done.
        size: Ranks that wrote it.
        tensors: By the path of their data sets, such as model/layers.0.weight and optimizer/exp_avg/layers.0.weight.
        scalars: Of the optimizer, by name and the parameter's name: what it keeps one number of, such as its steps.
        optimizer: Name of its class.
        about: Everything else, as JSON takes it: the run's configuration, the place in the data, versions.
        files: By name.
    """

    step: int
    size: int
    tensors: Mapping[str, TensorRecord]
    scalars: Mapping[str, Mapping[str, float]]
    optimizer: str
    about: Mapping[str, Any]
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def shard_name(step: int, rank: int) -> str:
    """Return the name of a rank's file. Local.

    The step is in it because HDF5, where a file that an index refers to is missing, also looks for that name in the
    current directory, which may be another checkpoint.
    """
    return f"{step_name(step)}_rank_{rank:05d}.h5"


def step_name(step: int) -> str:
    """Return the name of the directory of a step. Local."""
    return f"step_{step:08d}"


def steps_in(directory: Path) -> dict[int, Path]:
    """Return the directories that have a checkpoint's name, by step, the oldest first. Local."""
    if not directory.is_dir():
        return {}
    found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest, and see it on the disk. Local."""
    # As a reader will have it: JSON turns keys that are numbers into text, which sorts otherwise.
    body = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}))
    document = {**body, "checksum": _checksum(body)}
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint. Local.

    Raises:
        UserError: There is none, it is damaged, or it is of another version.
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
        raise UserError(f"{path} is damaged: {in_one_line(error)}") from error


def _from_json(body: Mapping[str, Any]) -> Manifest:
    tensors = {
        path: TensorRecord(
            record["kind"], record["dtype"], tuple(record["shape"]), tuple(tuple(piece) for piece in record["pieces"])
        )
        for path, record in body["tensors"].items()
    }
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    names = ("step", "size", "scalars", "optimizer", "about")
    return Manifest(tensors=tensors, files=files, **{name: body[name] for name in names})


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
