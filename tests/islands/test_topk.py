"""The largest elements of a difference, encoded in 14 bits each, and what is left for the next difference."""

import math

import pytest
import torch

from odc_mpi.islands.encoding import make_encoding
from odc_mpi.islands.fragments import make_fragments
from odc_mpi.islands.outer_optimizer import OuterOptimizer
from odc_mpi.islands.topk import BLOCK_NUMEL
from odc_mpi.simulate.options import WIRE_BYTES


def round_trip(flat, share=0.03):
    encoding = make_encoding("topk", share)
    message = torch.full((encoding.num_bytes(flat.numel()),), 0xAA, dtype=torch.uint8)
    encoding.encode(flat, message)
    out = torch.full_like(flat, 0.5)
    encoding.decode(message, out)
    return out


def reference(block, count):
    """One block in plain Python, for magnitudes that all differ."""
    chosen = sorted(range(len(block)), key=lambda i: -abs(block[i]))[:count]
    sizes = [abs(block[i]) for i in chosen]
    middle = (torch.tensor(min(sizes)) + torch.tensor(max(sizes))) / 2
    groups = [[size for size in sizes if size <= middle], [size for size in sizes if size > middle]]
    means = [torch.tensor(math.fsum(group) / max(1, len(group))).bfloat16().item() for group in groups]
    return {i: math.copysign(means[abs(block[i]) > middle], block[i]) for i in chosen}


@pytest.mark.parametrize("share", [0.0001, 0.03, 0.25])
@pytest.mark.parametrize("numel", [1, 7, 32, 4095, 4096, 3 * 4096 + 96])
def test_the_largest_elements_arrive_with_one_of_two_magnitudes(numel, share):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    arrived = round_trip(flat, share)
    for before, after in zip(flat.split(BLOCK_NUMEL), arrived.split(BLOCK_NUMEL), strict=True):
        expected = reference(before.tolist(), math.ceil(len(before) * share))
        assert dict(enumerate(after.tolist())) == dict.fromkeys(range(len(before)), 0.0) | expected


def test_special_values():
    assert round_trip(torch.zeros(4096)).tolist() == [0.0] * 4096
    assert round_trip(torch.full((64,), -2.0), 0.25).sum() == -2.0 * 16
    for value in (math.nan, math.inf):
        flat = torch.randn(8192)
        flat[5000] = value
        arrived = round_trip(flat)
        assert arrived[:4096].isfinite().all() and not arrived[4096:].isfinite().all()


def test_blocks_are_those_that_messages_of_many_blocks_have():
    flat = torch.randn(300 * 4096)  # more than are encoded at a time
    parts = [round_trip(part) for part in flat.split(4096)]
    assert torch.equal(round_trip(flat), torch.cat(parts))


def test_three_percent_are_a_tenth_of_e3m0():
    numel = 1000 * BLOCK_NUMEL
    num_bytes = make_encoding("topk", 0.03).num_bytes(numel)
    assert num_bytes * 8 <= make_encoding("e3m0", 0.03).num_bytes(numel)
    assert num_bytes == WIRE_BYTES["topk"] * numel


def test_after_a_thousand_merges_everything_was_sent_or_is_left():
    generator = torch.Generator().manual_seed(0)
    local = torch.nn.Parameter(torch.zeros(6000))
    fragments = make_fragments([(6000, 0, 6000)], 1)
    optimizer = OuterOptimizer(
        [local], fragments, make_encoding("topk", 0.03), learning_rate=1.0, momentum=0.0, error_feedback=True
    )
    differences, sent = torch.zeros(6000, dtype=torch.float64), torch.zeros(6000, dtype=torch.float64)
    for _ in range(1000):
        difference = torch.randn(6000, generator=generator) + 0.1
        local.data.copy_(optimizer.outer[0] - difference)
        differences += (optimizer.outer[0] - local.data).double()
        mean, _ = optimizer.combine(0, optimizer.encode(0)[None], [1.0])
        sent += mean[:6000].double()
    left = differences - sent - optimizer.residuals[0].double()
    assert left.abs().max() <= 1e-5 * differences.abs().max()
    assert optimizer.residuals[0].abs().max() < 0.3 * differences.abs().max()
