"""Verification of the base model of adapters with SHA-256 digests.

Instead of the base model, an adapter checkpoint contains the origin of this model (a directory, or a configuration and
a seed) and a SHA-256 digest of each of its parts. A part is a 256 MiB block of a safetensors file, or a randomly
initialized parameter. Each rank verifies a share of the parts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from odc_mpi.errors import UserError
from odc_mpi.shard.local_shards import WeightSource


class HashedWeights(WeightSource, Protocol):
    """Interface for weight sources that are divided into named parts, each of which has a digest."""

    def parts(self) -> list[str]:
        """Return the names of the parts."""

    def digest(self, part: str) -> str:
        """Read a part and return the SHA-256 digest of its content as a hexadecimal string."""


def part_digests(weights: HashedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Read this rank's share of the parts and return their digests, keyed by part. `size` is the number of ranks."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: HashedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Verify this rank's share of the adapters' base model. `size` is the number of ranks.

    `record`, from the checkpoint, describes the base model. It contains `path` (None for random weights), `config`,
    `seed`, and `sha256`, the digests of the parts. Raises `UserError` if part names or digests differ from the record.
    """
    expected: Mapping[str, str] = record["sha256"]
    differing = sorted(expected.keys() ^ weights.parts()) or [
        part for part, digest in part_digests(weights, rank, size).items() if digest != expected[part]
    ]
    if differing:
        raise UserError(
            f"model: expected the base model of the adapters, {describe_base(record)}, got a different one: "
            f"{differing[0].rpartition(':')[0] or differing[0]} differs: set model.path or --base to the right base"
        )


def describe_base(record: Mapping[str, Any]) -> str:
    """Return a description of a base model's origin for error messages. For `record`, see `check_base`."""
    if record["path"] is not None:
        return f"from {Path(record['path'])}"
    return f"a {record['config'].get('model_type')} randomly initialized with seed {record['seed']}"
