"""Random segments of a flat array, and the expected results, element by element in Python."""

import math

import numpy as np
import torch

from odc_mpi.comm.kernels import native

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TARGETS = [torch.float32, torch.float64]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e300, -1e39, 65504.0, 6e-8, -6.1e-5, 1e-40, 3.4e38]


def random_values(rng, shape, dtype, special=0.0, device="cpu"):
    """Values of very different sizes; a part of them infinite, NaN, subnormal or too large for other dtypes."""
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 5, size=shape)
    values = np.where(rng.random(shape) < special, rng.choice(SPECIAL, size=shape), values)
    return torch.from_numpy(np.asarray(values)).to(dtype).to(device)


def random_segments(rng, count, longest=40, alignment=1, special=0.0, device="cpu"):
    """Pieces in order, gaps between some of them, some empty or scalars, some with strides; and where the last ends."""
    segments, filled = [], 0
    for _ in range(count):
        start = filled + int(rng.choice([0, 0, 1, 3, 50]))
        start = -(-start // alignment) * alignment
        shape = [(), (0,), (1,), (int(rng.integers(2, longest)),), (2, 3, 4), (int(rng.integers(1, 9)), 7)]
        dtype = DTYPES[rng.integers(len(DTYPES))]
        segment = random_values(rng, shape[rng.integers(len(shape))], dtype, special, device)
        form = rng.integers(6)
        if form == 0 and segment.dim():
            segment = segment.flip(0).transpose(0, -1)
        elif form == 1 and segment.dim() == 1 and segment.numel() > 1:
            segment = segment[1:]  # no multiple of 16 bytes any more
        elif form == 2 and segment.dim() and dtype is not torch.float16:
            segment = segment.to_sparse()
        segments.append((start, segment))
        filled = start + segment.numel()
    return segments, filled


def random_slots(rng, numel, count, special=0.0, device="cpu"):
    """Slots of a shard of `[numel]`, over one another and in no order."""
    slots = []
    for _ in range(count):
        start = int(rng.integers(0, numel + 1))
        length = int(rng.integers(0, numel - start + 1))
        dtype = DTYPES[rng.integers(len(DTYPES))]
        values = random_values(rng, (length + 1,), dtype, special, device)
        slots.append((start, values[int(rng.integers(2)) :][:length]))
    return slots


def elements(tensor):
    """The elements as Python's numbers, in order."""
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().reshape(-1).tolist()


def flatten_naively(segments, numel, dtype):
    """The flat array, and the largest magnitude."""
    to = np.float32 if dtype is torch.float32 else np.float64
    flat = np.zeros(numel, dtype=to)
    with np.errstate(all="ignore"):
        for start, segment in segments:
            for i, x in enumerate(elements(segment)):
                flat[start + i] = to(x)
    magnitudes = [abs(float(x)) for x in flat]
    return torch.from_numpy(flat), math.nan if any(map(math.isnan, magnitudes)) else max(magnitudes, default=0.0)


def add_naively(shard, slots):
    """The sums."""
    sums = shard.cpu().numpy().copy()
    with np.errstate(all="ignore"):
        for start, slot in slots:
            for i, x in enumerate(elements(slot)):
                sums[start + i] = sums[start + i] + sums.dtype.type(x)
    return torch.from_numpy(sums)


def assert_same(made, wanted):
    """Compare bit for bit, except the bits of a NaN."""
    made, wanted = made.cpu(), wanted.cpu()
    assert made.dtype == wanted.dtype and made.shape == wanted.shape
    assert torch.equal(made.isnan(), wanted.isnan())
    bits = torch.int32 if made.dtype is torch.float32 else torch.int64
    assert torch.equal(*(x.nan_to_num(0, math.inf, -math.inf).view(bits) for x in (made, wanted)))


def assert_same_number(made, wanted):
    """Equal, or both NaN."""
    assert made.dtype is torch.float64 and made.shape == ()
    assert float(made) == wanted or (math.isnan(float(made)) and math.isnan(wanted)), (float(made), wanted)


def assert_flatten_as_torch(rng, count, longest, special, device):
    """Flatten random segments into a part of an array: to the bit as with torch, and nothing around it changes."""
    segments, filled = random_segments(rng, count, longest, int(rng.choice([1, 4, 32])), special, device)
    numel, offset = filled + int(rng.choice([0, 5])), int(rng.choice([0, 4, 1]))
    around = torch.full((numel + 9,), -7.0, device=device)
    flat = around[offset : offset + numel]
    largest, wanted = native.flatten(segments, flat), torch.empty_like(flat)
    wanted_largest = native.flatten_with_torch(segments, wanted)
    assert_same(flat, wanted)
    assert_same_number(largest, float(wanted_largest))
    assert (around[:offset] == -7).all() and (around[offset + numel :] == -7).all(), "written beyond the array"


def assert_add_segments_as_torch(rng, numel, num_slots, special, device):
    """Add random slots to a part of an array: to the bit as with torch, and nothing around it changes."""
    around, offset = random_values(rng, (numel + 9,), torch.float32, special, device), int(rng.choice([0, 4, 1]))
    before, shard = around.clone(), around[offset : offset + numel]
    slots = random_slots(rng, numel, num_slots, special, device)
    wanted = shard.clone()
    native.add_segments_(shard, slots)
    native.add_segments_with_torch_(wanted, slots)
    assert_same(shard, wanted)
    assert_same(around[:offset], before[:offset])
    assert_same(around[offset + numel :], before[offset + numel :])
