"""Verification of the base model of adapters by SHA-256 digests.

An adapter checkpoint does not contain the base model. It contains the origin of the base (a directory, or a
configuration and a seed), and a SHA-256 digest of each part. A part is a block of 256 MiB of a safetensors file, or a
randomly initialized parameter. The parts are distributed over the ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from odc_mpi.errors import UserError
from odc_mpi.shard.local_shards import WeightSource


class HashedWeights(WeightSource, Protocol):
    """Source of weights that consist of named parts, each with a digest."""

    def parts(self) -> list[str]:
        """Return the names of the parts."""

    def digest(self, part: str) -> str:
        """Read a part, and return the SHA-256 of its content in hexadecimal."""


def part_digests(weights: HashedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Read this rank's share of the parts, and return their SHA-256 digests by name. Does not communicate."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: HashedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Verify one of `size` shares of the base model of adapters. Does not communicate.

    `record` describes the base model in the checkpoint: `path`, or `config` and `seed`, and `sha256` by part. Raises a
    `UserError` if the share of this rank differs from it.
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
    """Return a text for error messages about the origin of a base model. For `record`, see `check_base`."""
    if record["path"] is not None:
        return f"from {Path(record['path'])}"
    return f"a {record['config'].get('model_type')} randomly initialized with seed {record['seed']}"
