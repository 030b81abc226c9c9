"""Fragments, their schedule and the outer optimizer, against numbers computed by hand and torch's own optimizer."""

import pytest
import torch

from odc_mpi.islands.encoding import make_encoding
from odc_mpi.islands.fragments import Schedule, make_fragments
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized


def optimizer_of(parameter, wire="float32", **options):
    """The outer optimizer of one parameter in one fragment."""
    numel = parameter.numel()
    options = {"learning_rate": 1.0, "momentum": 0.0} | options
    return OuterOptimizer([parameter], make_fragments([(numel, 0, numel)], 1), make_encoding(wire), **options)


def train_scalars(steps, *, delay, local_share):
    """Two parameters, each a fragment: both begin at 1, and each step of two equal islands subtracts 2.

    Returns both after each step. The numbers are those of torchft's regression tests.
    """
    layers = [torch.nn.Parameter(torch.ones(32)) for _ in range(2)]
    fragments = make_fragments([(32, 0, 32)] * 2, 2)
    options = {"learning_rate": 2.0, "momentum": 0.0, "local_share": local_share}
    optimizer, schedule = OuterOptimizer(layers, fragments, make_encoding("float32"), **options), Schedule(6, 2, delay)
    sent, values, num_sent, num_applied = {}, [], 0, 0
    for step in range(1, steps + 1):
        for layer in layers:
            layer.data -= 2.0
        if schedule.sends_after(step):
            sent[num_sent % 2] = optimizer.encode(num_sent % 2)
            num_sent += 1
        if schedule.applies_after(step):
            index, num_applied = num_applied % 2, num_applied + 1
            message = sent.pop(index)
            optimizer.apply(index, optimizer.combine(index, torch.stack([message, message]), [0.5, 0.5])[0])
        values.append([float(layer.detach()[0]) for layer in layers])
    return values


@pytest.mark.parametrize(
    ("delay", "local_share", "third", "sixth"),
    [(0, 0.0, -11, -23), (0, 0.5, -8, -17), (0, 1.0, -5, -11), (1, 0.0, -7, -19), (1, 0.5, -6, -15)],
)
def test_outer_steps_are_those_of_torchft(delay, local_share, third, sixth):
    values = train_scalars(6, delay=delay, local_share=local_share)
    assert [first for first, _ in values[:3]] == [-1, -3, third]
    assert [second for _, second in values] == [-1, -3, -5, -7, -9, sixth]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_outer_step_is_that_of_sgd_with_nesterov_momentum(momentum):
    torch.manual_seed(0)
    local = torch.nn.Parameter(torch.randn(64))
    ours = optimizer_of(local, learning_rate=0.7, momentum=momentum)
    outer = torch.nn.Parameter(local.detach().clone())
    theirs = torch.optim.SGD([outer], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        mean = torch.randn(64)
        ours.apply(0, mean)
        outer.grad = mean
        theirs.step()
        torch.testing.assert_close(local.detach(), outer.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.outer[0], local)


@pytest.mark.parametrize("num_fragments", [1, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_element_is_in_one_fragment_whatever_the_number_of_ranks(num_fragments, num_ranks):
    """The fragments of an element, and the blocks of 32 that are encoded together, do not depend on the ranks."""
    sizes = [100, 5, 320, 64]
    blocks = {}
    for ranks in (1, num_ranks):
        found = {}
        for rank in range(ranks):
            slices = [slice_of_rank(size, rank, ranks) for size in sizes]
            values = [1000 * i + torch.arange(s[1], s[2], dtype=torch.float32) + 1 for i, s in enumerate(slices)]
            for number, fragment in enumerate(make_fragments(slices, num_fragments)):
                for offset, value in enumerate(fragment.read(values).tolist()):
                    if value:
                        found[value - 1] = (number, offset % 32)
        assert found.keys() == {1000 * i + j for i, size in enumerate(sizes) for j in range(size)}
        blocks[ranks] = found
    assert blocks[1] == blocks[num_ranks]
    counts = [sum(number == each for number, _ in blocks[1].values()) for each in range(num_fragments)]
    assert max(counts) - min(counts) <= 96


def slice_of_rank(size, rank, ranks):
    share = -(-size // (32 * ranks)) * 32
    return size, min(size, rank * share), min(size, (rank + 1) * share)


def test_error_feedback_sends_what_an_encoding_lost_with_the_next_difference():
    """The sum of what arrived differs from the sum of what was to be sent by one residual, not by one per step."""
    torch.manual_seed(1)
    sums = {}
    for feedback in (False, True):
        local = torch.nn.Parameter(torch.zeros(32))
        optimizer, arrived = optimizer_of(local, "e3m0", error_feedback=feedback), torch.zeros(32)
        change = torch.linspace(0.1, 1.0, 32)
        for _ in range(20):
            local.data.copy_(-change)
            arrived += optimizer.combine(0, optimizer.encode(0)[None], [1.0])[0]
        sums[feedback] = (arrived - 20 * change).abs().max()
    assert sums[True] < 0.3 < 2 < sums[False]


def test_a_difference_that_is_not_finite_does_not_stay_in_the_residual():
    local = torch.nn.Parameter(torch.zeros(32))
    optimizer = optimizer_of(local, "int8", error_feedback=True)
    local.data[3] = float("nan")
    message = optimizer.encode(0)
    assert optimizer.combine(0, message[None], [1.0])[1][0] != optimizer.combine(0, message[None], [1.0])[1][0]
    local.data.zero_()
    assert not optimizer.combine(0, optimizer.encode(0)[None], [1.0])[0].any()


def test_weights_sum_to_1_or_are_all_0():
    assert normalized([3.0, 0.0, 1.0]) == [0.75, 0.0, 0.25]
    assert normalized([0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]


def test_an_island_that_was_late_keeps_its_difference_and_what_it_did_not_send():
    local = torch.nn.Parameter(torch.zeros(32))
    optimizer = optimizer_of(local, "int8", error_feedback=True)
    local.data[:] = torch.linspace(-1.0, 1.0, 32)
    optimizer.encode(0)
    before = [each.clone() for each in optimizer.residuals]
    local.data[0] = 3.1
    optimizer.encode(0)
    assert not torch.equal(optimizer.residuals[0], before[0])
    optimizer.take_back(0)
    assert torch.equal(optimizer.residuals[0], before[0])
    difference = (optimizer.outer[0] - local).detach()
    optimizer.catch_up([torch.full((32,), 8.0)], [torch.full((32,), 2.0)])
    torch.testing.assert_close((optimizer.outer[0] - local).detach(), difference, rtol=0, atol=1e-6)
    assert optimizer.outer[0].eq(8).all() and optimizer.velocities[0].eq(2).all()
