import math

import numpy as np
import pytest
import torch

from odc_mpi.shard.fixed_point import FIRST_EXPONENT, MAX_RISE, FixedPointGradients

NUMEL = 40_000


def gradients(count: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Elements over 40 binary orders of magnitude, so that fp32 sums of them depend on their order."""
    generator = torch.Generator().manual_seed(5)
    return [
        scale * torch.randn(NUMEL, generator=generator) * torch.exp2(-40 * torch.rand(NUMEL, generator=generator))
        for _ in range(count)
    ]


def split(gradient: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(0, gradient[:100]), (100, gradient[100:])]


def run(ranks: list[FixedPointGradients], dealt: list[list[torch.Tensor]]) -> tuple[torch.Tensor, bool]:
    """One minibatch: each rank pushes its gradients, the last two of them as one local sum."""
    window, output = torch.zeros(NUMEL, dtype=torch.int64), []
    for rank, of_rank in zip(ranks, dealt, strict=True):
        rank.start()
        for gradient in of_rank[:-2]:
            flat = torch.full((NUMEL,), 7)
            rank.write_flat(3, split(gradient), flat)
            window += flat
        local_sum = torch.zeros(NUMEL, dtype=torch.int64)
        for gradient in of_rank[-2:]:
            rank.accumulate(3, split(gradient), local_sum)
        rank.note_push(3, local_sum)
        window += local_sum
        output.append(rank.local_statistics())
    totals = np.stack(output).sum(axis=0)
    finite = [rank.apply_global_statistics(totals) for rank in ranks]
    assert len(set(finite)) == 1
    return window, finite[0]


def new(count: int) -> list[FixedPointGradients]:
    return [FixedPointGradients({3: NUMEL}) for _ in range(count)]


def test_neither_order_nor_ranks_change_a_bit() -> None:
    ranks, single_rank, steps = new(3), new(1), gradients(12)
    for _ in range(4):
        window, finite = run(ranks, [steps[:2], steps[2:9], steps[9:]])
        other, _ = run(single_rank, [steps[::-1]])
        assert finite and torch.equal(window, other)
        assert ranks[0].exponents == ranks[2].exponents == single_rank[0].exponents
        assert ranks[0].relative_error == single_rank[0].relative_error
    wanted = torch.stack([gradient.double() for gradient in steps]).sum(0)
    got = single_rank[0].to_gradients(3, other, torch.empty(0, dtype=torch.float64))
    # Half a step of each of twelve.
    assert (got - wanted).abs().max() <= 6 * 2.0 ** -single_rank[0].exponents[3]
    assert 0 < single_rank[0].relative_error < 2.0**-40
    order = torch.stack(steps).sum(0), torch.stack(steps[::-1]).cumsum(0)[-1]
    assert not torch.equal(*order), "fp32 sums of these do not depend on their order: the test shows nothing"


def test_the_reported_error_is_the_error() -> None:
    (rank,), steps = new(1), gradients(3, scale=1e-5)
    run([rank], [steps])
    scale = 2.0**FIRST_EXPONENT
    exact = torch.stack([gradient.double() * scale for gradient in steps])
    wanted = float((exact - exact.round()).abs().sum() / exact.round().abs().sum())
    assert rank.relative_error == pytest.approx(wanted, rel=0.1)  # that of most of them


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6, 1e30])
def test_exponents_leave_headroom_and_lose_little(scale: float) -> None:
    (rank,), steps = new(1), gradients(5, scale)
    skipped = 0
    for _ in range(20):
        before = rank.exponents[3]
        window, finite = run([rank], [steps])
        skipped += not finite
        assert rank.exponents[3] - before <= MAX_RISE
        if finite:
            wanted = torch.stack([gradient.double() for gradient in steps]).sum(0)
            got = rank.to_gradients(3, window, torch.empty(0, dtype=torch.float64))
            assert (got - wanted).abs().max() <= 3 * 2.0**-before
    assert finite and skipped <= (0 if scale <= 1 else 5)
    largest = float(window.abs().max())
    assert 2.0**47 < largest < 2.0**53


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_values_that_are_not_finite_or_too_large_are_reported(bad: float) -> None:
    (rank,), steps = new(1), gradients(3)
    run([rank], [steps])
    before = rank.exponents[3]
    spoiled = [steps[0].clone(), *steps[1:]]
    spoiled[0][17] = bad
    _, finite = run([rank], [spoiled])
    assert not finite
    assert rank.exponents[3] < before if bad == 3e38 else rank.exponents[3] == before
    assert math.isnan(rank.norm(rank.sum_of_squares({3: [torch.ones(5)]})))


def test_a_sum_that_would_overflow_is_found_before_it_does() -> None:
    (rank,) = new(1)
    # A third of 2**62 steps each.
    gradient = torch.full((NUMEL,), 2.0 ** (62 - FIRST_EXPONENT) / 3)
    for count, wanted in ((2, True), (4, False)):
        (rank,) = new(1)
        assert run([rank], [[gradient] * count])[1] is wanted


@pytest.mark.parametrize("divisor", [1.0, 3.0, 1e5])
def test_the_norm_does_not_depend_on_the_cut(divisor: float) -> None:
    steps = gradients(4)
    norms = []
    for cut in ([NUMEL], [32, NUMEL - 32], [12_800, 16, NUMEL - 12_816]):
        (rank,) = new(1)
        window, _ = run([rank], [steps])
        rank.note_scaling(divisor)
        total = rank.to_gradients(3, window, torch.empty(0)).div_(divisor)
        norms.append(rank.norm(sum(rank.sum_of_squares({3: [part]}) for part in total.split(cut))))
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(float(total.double().norm()), rel=1e-14)


def test_arrays_without_gradients_do_not_change() -> None:
    rank = FixedPointGradients({0: 10, 4: 20})
    rank.start()
    flat = torch.zeros(20, dtype=torch.int64)
    rank.write_flat(4, [(3, torch.ones(2, 2, dtype=torch.bfloat16).t())], flat)
    assert rank.apply_global_statistics(rank.local_statistics())
    assert flat.tolist() == [0] * 3 + [2**FIRST_EXPONENT] * 4 + [0] * 13
    assert rank.exponents[0] == FIRST_EXPONENT
    assert rank.norm(rank.sum_of_squares({4: [rank.to_gradients(4, flat, torch.empty(0))]})) == 2.0
