"""Encoding `topk`: the largest elements of a difference alone, as in SparseLoCo. This module does not communicate.

    4 bytes         two magnitudes, bfloat16: the means of the smaller and of the larger ones
    k times 12 bits ascending indices of the k elements of a block that are largest in magnitude
    k times 2 bits  a sign, and which of the two magnitudes

Blocks have 4,096 elements of this rank's part of a fragment, the last one may have fewer, and k is a share of them, the
setting `islands.topk`. Unlike those of other encodings, blocks and thus results depend on the number of ranks of an
island. Elements that are not sent must not be lost: error feedback, which is required, adds them to the next one,
as DCT does (arXiv 2010.08899), so that each is sent once it has grown. A block with an infinity or a NaN is decoded as
one with infinities or NaN.
"""

import math
from collections.abc import Iterator

import torch

#: Number of elements in a block, so that 12 bits number them.
BLOCK_NUMEL = 4096
#: Bytes of the two magnitudes.
_MAGNITUDE_BYTES = 4
#: Number of blocks that are encoded at a time: 4 MiB of float32.
_CHUNK_BLOCKS = 256


def topk_bytes(numel: int, share: float) -> int:
    """Return the number of bytes in an encoded block of `numel` elements."""
    count = _count(numel, share)
    return _MAGNITUDE_BYTES + -(-count // 2) * 3 + -(-count // 4)


class TopK:
    """Encoding of float32 arrays as bytes, with the interface of `Encoding`, for arrays of any size.

    Args:
        share: Share of the elements of a block to send, above 0 and at most 1. At least one element is sent.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes in an encoded array of `numel` elements."""
        full, rest = divmod(numel, BLOCK_NUMEL)
        return full * topk_bytes(BLOCK_NUMEL, self._share) + (topk_bytes(rest, self._share) if rest else 0)

    def encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Encode a contiguous float32 tensor [n] into a contiguous uint8 tensor [num_bytes(n)]."""
        for blocks, message in self._chunks(flat, out):
            _encode(blocks, message, _count(blocks.shape[1], self._share))

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a contiguous uint8 tensor [num_bytes(n)] into a contiguous float32 tensor [n]."""
        for blocks, encoded in self._chunks(out, message):
            _decode(encoded, blocks, _count(blocks.shape[1], self._share))

    def _chunks(self, flat: torch.Tensor, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert message.numel() == self.num_bytes(flat.numel()), (message.numel(), flat.numel())
        full = flat.numel() // BLOCK_NUMEL
        split = full * topk_bytes(BLOCK_NUMEL, self._share)
        if full:
            blocks = flat[: full * BLOCK_NUMEL].view(full, -1).split(_CHUNK_BLOCKS)
            yield from zip(blocks, message[:split].view(full, -1).split(_CHUNK_BLOCKS), strict=True)
        if flat.numel() % BLOCK_NUMEL:
            yield flat[full * BLOCK_NUMEL :][None], message[split:][None]


def _count(numel: int, share: float) -> int:
    return min(numel, math.ceil(numel * share))


def _encode(blocks: torch.Tensor, message: torch.Tensor, count: int) -> None:
    indices = blocks.abs().topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values = blocks.gather(1, indices)
    magnitudes = values.abs()
    is_larger = magnitudes > (magnitudes.amin(1, keepdim=True) + magnitudes.amax(1, keepdim=True)) / 2
    means = [_mean(magnitudes, ~is_larger), _mean(magnitudes, is_larger)]
    signs = values.signbit().to(torch.uint8)
    message[:, :_MAGNITUDE_BYTES] = torch.stack(means, 1).bfloat16().view(torch.uint8)
    pairs = _padded(indices, 2).view(len(blocks), -1, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    packed = torch.stack((low & 255, low >> 8 | (high & 15) << 4, high >> 4), 2).to(torch.uint8).flatten(1)
    codes = _padded(signs << 1 | is_larger.to(torch.uint8), 4).view(len(blocks), -1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    message[:, _MAGNITUDE_BYTES:] = torch.cat((packed, (codes << shifts).sum(2, dtype=torch.uint8)), 1)


def _decode(message: torch.Tensor, blocks: torch.Tensor, count: int) -> None:
    num_index_bytes = -(-count // 2) * 3
    means = message[:, :_MAGNITUDE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    packed = message[:, _MAGNITUDE_BYTES:][:, :num_index_bytes].long().view(len(blocks), -1, 3)
    low, middle, high = packed.unbind(2)
    indices = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), 2).flatten(1)[:, :count]
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device)
    codes = (message[:, _MAGNITUDE_BYTES + num_index_bytes :].long()[..., None] >> shifts).flatten(1)[:, :count]
    values = means.gather(1, codes & 1)
    blocks.zero_().scatter_(1, indices, torch.where((codes & 2).bool(), -values, values))


def _mean(magnitudes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row's chosen magnitudes, float32 [rows], or 0 where none is chosen."""
    return magnitudes.where(chosen, 0.0).sum(1) / chosen.sum(1).clamp(min=1)


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple))
