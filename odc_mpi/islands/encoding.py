"""Encodings of differences of parameters for messages between islands. This module does not communicate.

    name       bytes for 32 elements   values
    float32    128                     unchanged
    bfloat16   64                      rounded to nearest even
    int8       33                      an exponent byte, 32 signed bytes
    e3m0       17                      an exponent byte, 32 times 4 bits: a sign and a power of two
    topk       1.7 with 3 %            see `islands.topk`, whose blocks are larger

Arrays are encoded in blocks of 32 elements, the alignment of shards. The bytes of a block depend on its elements
alone, and the message of an array is the concatenation of those of its blocks. How the parameters are sharded
therefore does not change any value.

An exponent byte E gives a block's values in units of 2**(E - 133), which is 1/64 of the power of two 2**(E - 127):

    int8    E is the largest magnitude's exponent as stored in float32. Values are integers from -127 to 127.
    e3m0    E is the exponent of the power of two nearest to the largest magnitude. Values are 0, or 1 to 64 in powers
            of two. 4 bits as in Streaming DiLoCo (arXiv 2501.18512); the exponent byte is a choice made here.

E is 0 for a block of zeros, and 255 for a block that contains an infinity or a NaN, which is decoded as NaN.
Multiplication by a power of two is exact, so the results are the same on all machines and with any number of threads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from odc_mpi.islands.topk import TopK

#: Number of elements in a block. The number of elements in an array to encode must be a multiple of it.
BLOCK_NUMEL = 32

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
#: Bit of the mantissa that is set from the middle between two powers of two on.
_HALF_BIT = 22
#: Exponent byte of blocks with an infinity or a NaN.
_NOT_FINITE = 255
#: Smallest exponent byte of a block that is not encoded as zeros. Smaller values, below 2**-118, have no effect, and
#: from here on results do not depend on a processor's treatment of subnormal numbers.
_SMALLEST = 9
#: Number of blocks that are encoded at a time: 512 KiB of float32, so that intermediate tensors stay in a core's cache.
_CHUNK_BLOCKS = 4096


@dataclass(frozen=True)
class Encoding:
    """Encoding of float32 arrays as bytes.

    Attributes:
        block_bytes: Number of bytes in an encoded block.
    """

    block_bytes: int
    _encode_blocks: Callable[[torch.Tensor, torch.Tensor], None]
    _decode_blocks: Callable[[torch.Tensor, torch.Tensor], None]

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes in an encoded array of `numel` elements, which must be a multiple of 32."""
        return numel // BLOCK_NUMEL * self.block_bytes

    def encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Encode a contiguous float32 tensor [n] into a contiguous uint8 tensor [num_bytes(n)]."""
        for blocks, message in self._chunks(flat, out):
            self._encode_blocks(blocks, message)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a contiguous uint8 tensor [num_bytes(n)] into a contiguous float32 tensor [n]."""
        for blocks, encoded in self._chunks(out, message):
            self._decode_blocks(encoded, blocks)

    def _chunks(self, flat: torch.Tensor, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert message.numel() == self.num_bytes(flat.numel()), (message.numel(), flat.numel())
        blocks = flat.view(-1, BLOCK_NUMEL).split(_CHUNK_BLOCKS)
        return zip(blocks, message.view(-1, self.block_bytes).split(_CHUNK_BLOCKS), strict=True)


def make_encoding(name: str, topk: float = 0.03) -> Encoding | TopK:
    """Return the encoding with the given name, which is a value of the setting `islands.wire`.

    `topk` is the share of the elements that the encoding "topk" sends.
    """
    return TopK(topk) if name == "topk" else _ENCODINGS[name]


def _encode_floats(dtype: torch.dtype, blocks: torch.Tensor, message: torch.Tensor) -> None:
    message.copy_(blocks.to(dtype).view(torch.uint8))


def _decode_floats(dtype: torch.dtype, message: torch.Tensor, blocks: torch.Tensor) -> None:
    blocks.copy_(message.view(dtype))


def _encode_int8(blocks: torch.Tensor, message: torch.Tensor) -> None:
    largest = (blocks.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    exponents = _exponents(largest, largest >> 23)
    message[:, :1] = exponents
    inverse_units = ((260 - _zeros_as_largest(exponents)) << 23).view(torch.float32)
    scaled = (blocks * inverse_units).nan_to_num_().round_().clamp_(-127, 127)
    message[:, 1:].view(torch.int8).copy_(scaled)


def _decode_int8(message: torch.Tensor, blocks: torch.Tensor) -> None:
    blocks.copy_(message[:, 1:].view(torch.int8))
    blocks.mul_(_units(message))


def _encode_e3m0(blocks: torch.Tensor, message: torch.Tensor) -> None:
    bits = blocks.view(torch.int32)
    magnitudes = bits & _MAGNITUDE
    largest = magnitudes.amax(1, keepdim=True)
    exponents = _exponents(largest, (largest >> 23) + (largest >> _HALF_BIT & 1))
    message[:, :1] = exponents
    # Relative to half the smallest magnitude that has a code: below, zero is nearer, and the difference is negative.
    magnitudes -= (_zeros_as_largest(exponents) - 7) << 23
    at_least = (magnitudes >> 31).add_(1)
    # Adding half a power of two rounds to the nearest one.
    codes = magnitudes.add_(1 << _HALF_BIT).bitwise_right_shift_(23)
    codes = torch.maximum(codes, at_least, out=codes).clamp_(max=7).bitwise_or_(bits >> 28 & 8)
    pairs = codes.to(torch.uint8).view(torch.int16)
    message[:, 1:] = pairs | pairs >> 4


def _decode_e3m0(message: torch.Tensor, blocks: torch.Tensor) -> None:
    pairs = _E3M0_PAIRS.to(message.device).index_select(0, message[:, 1:].reshape(-1).int())
    torch.mul(pairs.view(torch.float32).view_as(blocks), _units(message), out=blocks)


def _exponents(largest: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the exponent bytes of blocks, int32 [blocks, 1], given the bits of their largest magnitudes."""
    exponents = exponents.masked_fill(exponents < _SMALLEST, 0).clamp_(max=_NOT_FINITE - 1)
    return exponents.masked_fill_(largest >= _INFINITY, _NOT_FINITE)


def _zeros_as_largest(exponents: torch.Tensor) -> torch.Tensor:
    """Return exponents for scaling: 255 instead of 0, relative to which all elements of such a block round to 0."""
    return exponents.masked_fill(exponents == 0, _NOT_FINITE)


def _units(message: torch.Tensor) -> torch.Tensor:
    """Return the units of encoded blocks, float32 [blocks, 1]: powers of two, 0 for zeros, or NaN."""
    exponents = message[:, :1].int()
    units = ((exponents - 6).clamp_(min=0) << 23).view(torch.float32)
    return units.masked_fill_(exponents == _NOT_FINITE, torch.nan)


def _float_encoding(dtype: torch.dtype) -> Encoding:
    return Encoding(dtype.itemsize * BLOCK_NUMEL, partial(_encode_floats, dtype), partial(_decode_floats, dtype))


_E3M0_MAGNITUDES = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
_E3M0_VALUES = torch.cat((_E3M0_MAGNITUDES, -_E3M0_MAGNITUDES))
#: The two float32 values of each byte, in units of the block, as the bits of an int64 tensor [256].
_E3M0_PAIRS = torch.cartesian_prod(_E3M0_VALUES, _E3M0_VALUES).flip(1).view(torch.int64).view(-1)

_ENCODINGS = {
    "float32": _float_encoding(torch.float32),
    "bfloat16": _float_encoding(torch.bfloat16),
    "int8": Encoding(1 + BLOCK_NUMEL, _encode_int8, _decode_int8),
    "e3m0": Encoding(1 + BLOCK_NUMEL // 2, _encode_e3m0, _decode_e3m0),
}
