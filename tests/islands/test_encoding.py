import math

import pytest
import torch

from odc_mpi.islands.encoding import BLOCK_NUMEL, make_encoding
from odc_mpi.simulate.options import WIRE_BYTES

NAMES = ("float32", "bfloat16", "int8", "e3m0")
LARGEST = torch.finfo(torch.float32).max


def encode_flat(name, flat):
    message = torch.full((make_encoding(name).num_bytes(flat.numel()),), 0xAA, dtype=torch.uint8)
    make_encoding(name).encode(flat, message)
    return message


def decode_message(name, message, numel):
    out = torch.full((numel,), 0.5)
    make_encoding(name).decode(message, out)
    return out


def round_trip(name, flat):
    return decode_message(name, encode_flat(name, flat), flat.numel())


def padded_block(*values):
    return torch.tensor([*values, *[0.0] * (BLOCK_NUMEL - len(values))])


def extreme_values():
    """Blocks of all magnitudes, with ties of both roundings, subnormal numbers, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (200, BLOCK_NUMEL), generator=generator).to(torch.int32)
    any_bits = bits.view(torch.float32)
    ranges = torch.randint(0, 255, (300, 1), generator=generator) - torch.randint(0, 10, (300, 32), generator=generator)
    exponents = ranges.clamp(0, 254).to(torch.int32) << 23
    mantissas = torch.randint(0, 2**23, (300, BLOCK_NUMEL), generator=generator).to(torch.int32)
    # Few bits of mantissa: every fifth block has ties everywhere.
    mantissas[::5] &= 0x600000
    signs = torch.where(torch.rand(300, BLOCK_NUMEL, generator=generator) < 0.5, -1, 1)
    similar = (exponents | mantissas).view(torch.float32) * signs
    special = [
        padded_block(),
        padded_block(-0.0, -0.0),
        padded_block(1e-45, -1e-45, 1.1754942e-38),
        padded_block(2.0**-118, 2.0**-126, -(2.0**-125)),
        padded_block(math.nextafter(2.0**-118, 0)),
        padded_block(1.5 * 2.0**-119, 2.0**-126),
        padded_block(LARGEST, -LARGEST, 2.0**127, 1.0),
        padded_block(math.inf, 1.0),
        padded_block(1.0, -math.inf),
        padded_block(math.nan, -1.0),
    ]
    return torch.cat([any_bits.reshape(-1), similar.reshape(-1), *special])


def nearest_power(value):
    power = 2.0 ** (math.frexp(value)[1] - 1)
    return 2 * power if value - power >= 2 * power - value else power


def reference_int8(block):
    largest = max(abs(value) for value in block)
    if largest < 2.0**-118:
        return [0.0] * len(block)
    unit = 2.0 ** (math.frexp(largest)[1] - 7)
    return [unit * max(-127, min(127, round(value / unit))) for value in block]


def reference_e3m0(block):
    largest = max(abs(value) for value in block)
    top = min(nearest_power(largest), 2.0**127) if largest else 0.0
    if top < 2.0**-118:
        return [0.0] * len(block)
    levels = [0.0, *(top / 2**k for k in reversed(range(7)))]
    # Of two levels at the same distance the larger one.
    nearest = [min(levels, key=lambda level: (abs(abs(value) - level), -level)) for value in block]
    return [math.copysign(level, value) for level, value in zip(nearest, block, strict=True)]


@pytest.mark.parametrize(("name", "reference"), [("int8", reference_int8), ("e3m0", reference_e3m0)])
def test_blocks_are_decoded_as_by_a_slow_reference(name, reference):
    flat = extreme_values()
    decoded = round_trip(name, flat).view(-1, BLOCK_NUMEL).tolist()
    num_not_finite = 0
    for block, found in zip(flat.view(-1, BLOCK_NUMEL).tolist(), decoded, strict=True):
        if all(map(math.isfinite, block)):
            assert found == reference(block), block
        else:
            num_not_finite += 1
            assert all(map(math.isnan, found)), block
    assert num_not_finite > 3


def test_the_bytes_of_int8_are_known():
    # Units of 1: 64 to 128 is the range of the largest magnitude, and ties go to even numbers.
    message = encode_flat("int8", padded_block(-127.75, 2.5, 3.5, -0.5, 64.0))
    assert message[:6].tolist() == [127 + 6, 256 - 127, 2, 4, 0, 64]
    message = encode_flat("int8", padded_block(1.0, math.nan, math.inf, -math.inf))
    assert message[:5].tolist() == [255, 0, 0, 127, 256 - 127]


def test_the_bytes_of_e3m0_are_known():
    # 16 units of 1: magnitudes 0, 0.25, 0.5, 1, 2, 4, 8, 16.
    flat = padded_block(16.0, 12.0, 11.9, -6.0, 0.125, 0.1249, -0.3749, 0.375, 23.9, -0.0, 1.0, 2.0)
    assert round_trip("e3m0", flat)[:12].tolist() == [16, 16, 8, -8, 0.25, 0, -0.25, 0.5, 16, 0, 1, 2]
    message = encode_flat("e3m0", flat)
    assert message.tolist() == [127 + 4, 0x77, 0xE6, 0x01, 0x29, 0x87, 0x43, *[0] * 10]
    assert encode_flat("e3m0", padded_block(24.0))[:2].tolist() == [127 + 5, 0x07]


def test_blocks_below_the_smallest_magnitude_are_all_zero_bytes():
    for name in ("int8", "e3m0"):
        assert not encode_flat(name, padded_block(1e-37, 1e-45)).any()


def test_floats_are_plain():
    flat = extreme_values()
    assert torch.equal(round_trip("float32", flat).view(torch.int32), flat.view(torch.int32))
    ties = padded_block(1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, -math.inf, math.nan, LARGEST, 2.0**-130)
    expected = [1.0, 1 + 2.0**-6, 0.0, -math.inf, math.nan, math.inf, 2.0**-130]
    assert round_trip("bfloat16", ties)[:7].tolist() == pytest.approx(expected, abs=0, rel=0, nan_ok=True)


@pytest.mark.parametrize(("name", "num_bytes"), list(zip(NAMES, (128, 64, 33, 17), strict=True)))
def test_messages_of_parts_are_parts_of_the_message(name, num_bytes):
    # More than are encoded at a time, so that these boundaries move, too.
    flat = extreme_values().repeat(9)
    whole = encode_flat(name, flat)
    assert whole.numel() == flat.numel() // BLOCK_NUMEL * num_bytes
    cuts = [32, 4096, 4160, 131040, 131104]
    parts = torch.tensor_split(flat, cuts)
    assert torch.equal(torch.cat([encode_flat(name, part) for part in parts]), whole)
    messages = torch.tensor_split(whole, [cut // BLOCK_NUMEL * num_bytes for cut in cuts])
    decoded = [decode_message(name, *args) for args in zip(messages, map(torch.numel, parts), strict=True)]
    assert torch.equal(
        torch.cat(decoded).view(torch.int32), decode_message(name, whole, flat.numel()).view(torch.int32)
    )
    assert encode_flat(name, flat[:0]).numel() == 0


def test_the_simulator_assumes_the_sizes_of_the_encodings():
    for name, num_bytes in WIRE_BYTES.items():
        assert make_encoding(name).num_bytes(4096) == num_bytes * 4096
