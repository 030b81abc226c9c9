"""Output of `odc-mpi checkpoint list | verify | show | digest | index`. For `path`, see `checkpoint_directories`."""

import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from odc_mpi.checkpoint.groups import checkpoint_directories, newest_directory
from odc_mpi.checkpoint.index import write_index
from odc_mpi.checkpoint.manifest import INDEX, MANIFEST, VersionError, blocks, compute_digest
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.errors import UserError
from odc_mpi.files import atomic_write


def open_newest_checkpoint(path: Path) -> Checkpoint:
    """Open the newest complete checkpoint in `path`. Raise `UserError` if it is damaged, or if none is complete."""
    return Checkpoint(newest_directory(path))


def list_lines(path: Path) -> Iterator[str]:
    """Yield a line to print for each checkpoint in `path`, oldest first."""
    for directory in checkpoint_directories(path):
        try:
            with Checkpoint(directory) as checkpoint:
                manifest = checkpoint.manifest
                num_bytes = sum(record.num_bytes for record in manifest.files.values())
                saved_at = datetime.fromtimestamp((directory / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
                size = f"{num_bytes / 1e6:,.1f} MB, ranks {manifest.size}"
                yield f"{directory}  step {manifest.step}, {size}, {saved_at}"
        except UserError as error:
            yield f"{directory}  INVALID: {error}"


def verify(path: Path) -> tuple[list[str], int]:
    """Verify every byte of all checkpoints in `path`.

    Return the lines to print and the number of checkpoints that are damaged or could not be verified.
    """
    lines, num_damaged = [], 0
    for directory in checkpoint_directories(path):
        verdict = "DAMAGED"
        try:
            with Checkpoint(directory) as checkpoint:
                damage = list(checkpoint.verify())
        except VersionError as error:
            verdict, damage = "NOT VERIFIED", [str(error)]
        except UserError as error:
            damage = [str(error)]
        num_damaged += bool(damage)
        lines += [f"{directory}  {verdict if damage else 'intact'}", *(f"  {line}" for line in damage)]
    return lines, num_damaged


def show_lines(path: Path) -> Iterator[str]:
    """Yield lines that describe the newest checkpoint in `path`, including the 2-norm of each tensor."""
    with open_newest_checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
        islands = manifest.metadata.get("islands")
        island = f", island {islands['index']} of {islands['size']}, merge {islands['merge']}" if islands else ""
        ranks = f"ranks {manifest.size}{island}"
        yield f"{checkpoint.directory}  step {manifest.step}, {ranks}, optimizer {manifest.optimizer}"
        if "base" in manifest.metadata:
            adapter, base = manifest.metadata["adapter"], manifest.metadata["base"]
            base_text = base["path"] or f"randomly initialized with seed {base['seed']}"
            yield f"LoRA adapter r={adapter['r']} alpha={adapter['lora_alpha']}, base: {base_text}"
        for name, values in manifest.scalars.items():
            low, high = min(values.values()), max(values.values())
            yield f"optimizer {name}: {low:g}" + (f" to {high:g}" if high != low else "")
        width = max(map(len, manifest.tensors))
        for name, record in manifest.tensors.items():
            shape = "x".join(map(str, record.shape)) or "scalar"
            yield f"{name:{width}}  {record.kind:9}  {record.dtype:8}  {shape:>14}  norm {_norm(checkpoint, name):.6g}"


def digest_line(path: Path) -> str:
    """Return a line with the digest (see `compute_digest`) and the directory of the newest checkpoint in `path`."""
    with open_newest_checkpoint(path) as checkpoint:
        digest = compute_digest(checkpoint.manifest, lambda name, _: _read_blocks(checkpoint, name))
        return f"{digest}  {checkpoint.directory}"


def index_line(path: Path) -> str:
    """Write index.h5 for the newest checkpoint in `path` and return a line to print. Raise `UserError` on damage."""
    with open_newest_checkpoint(path) as checkpoint:
        if error := checkpoint.check_files(range(checkpoint.manifest.size)):
            raise UserError(error)
        index = checkpoint.directory / INDEX
        with atomic_write(index) as new:
            write_index(new, checkpoint.directory, checkpoint.manifest)
        return f"wrote {index}"


def _read_blocks(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    for start, stop in blocks(0, checkpoint.record(name).numel):
        yield checkpoint.read(name, start, stop)


def _norm(checkpoint: Checkpoint, name: str) -> float:
    """Return the 2-norm of a tensor. For fp8, it is the norm of the bit patterns of the values, read as integers."""
    total = 0.0
    for block in _read_blocks(checkpoint, name):
        if checkpoint.record(name).dtype == "bfloat16":
            block = (block.astype(np.uint32) << 16).view(np.float32)
        total += float(np.square(block.astype(np.float64)).sum())
    return math.sqrt(total)
