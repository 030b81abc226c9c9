"""The base of adapters: a reference to it, and whether a model is that base. No communication.

A checkpoint of adapters does not hold their base. It holds where the base comes from (a directory; or a configuration
and a seed) and a SHA-256 of each part of it: of each 256 MiB of the safetensors files, or of each drawn parameter. The
ranks share the parts out: each reads its share of the base to make the digests, and again to check them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from odc_mpi.errors import UserError


class DigestedWeights(Protocol):
    """Weights of a base, a `shard.slices.Weights` of which parts have digests."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor: ...  # noqa: D102
    def parts(self) -> list[str]: ...  # noqa: D102
    def digest(self, part: str) -> str: ...  # noqa: D102


def part_digests(weights: DigestedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Return the SHA-256 of this rank's share of the parts, by part. Local; reads them."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: DigestedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Check that a base is the one of a checkpoint of adapters, this rank's share of its parts. Local.

    Args:
        weights: Of the base that is there.
        record: The reference in the checkpoint: `path`, or `config` and `seed`; `sha256` by part.
        rank: This rank.
        size: Number of ranks that share the parts out.

    Raises:
        UserError: It is another base.
    """
    wanted: Mapping[str, str] = record["sha256"]
    found = dict.fromkeys(weights.parts(), "")
    differing = sorted(wanted.keys() ^ found.keys()) or [
        part for part, digest in part_digests(weights, rank, size).items() if digest != wanted[part]
    ]
    if differing:
        raise UserError(
            f"model: expected the base that the adapters were trained over, {describe(record)}, got another: "
            f"{differing[0].rpartition(':')[0] or differing[0]} differs: set model.path to that base"
        )


def describe(record: Mapping[str, Any]) -> str:
    """Say in words where a base comes from. Local."""
    if record["path"] is not None:
        return f"of {Path(record['path'])}"
    return f"a {record['config'].get('model_type')} drawn with seed {record['seed']}"
