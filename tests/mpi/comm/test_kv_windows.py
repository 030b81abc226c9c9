"""Attention of chunks on ranks, over windows, against torch's on unsplit sequences; and the order of waits."""

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from late_device import LateDevice

from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.models.context_parallel_attention import context_parallel_attention

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]

LAYERS, HEADS, GROUPS, SIZE, TOKENS = 3, 4, 2, 8, 24
TOKEN_BYTES = 2 * GROUPS * SIZE * 8  # in fp64, whose rounding hides no error


@pytest.fixture(params=[True, False], ids=["in_place", "gets"])
def windows(request, world):
    made = KVWindows(world, KVSizes(LAYERS, TOKEN_BYTES, TOKENS, TOKENS), shared=request.param)
    yield made
    made.close()
    made.close()


@pytest.fixture(params=[(True, True), (False, True), (True, False)], ids=["in_place", "gets", "not_pinned"])
def late_windows(request, world):
    shared, can_register = request.param
    device = LateDevice(copy_s=0.002, can_register=can_register)
    made = KVWindows(world, KVSizes(LAYERS, TOKEN_BYTES, TOKENS, TOKENS), shared=shared, device=device)
    assert bool(device.registered) == can_register
    put, flags = made._flags.put_messages, made._flags

    def put_after_copies(*args):
        assert not device.unfinished, "a flag is set before a copy is done"
        put(*args)

    flags.put_messages = put_after_copies
    yield made
    assert device.copies > LAYERS and not device.unfinished
    # Only what is in a mapped and pinned window needs no buffer.
    assert (made._pool.peak_bytes == 0) == (shared and can_register)
    made.close()
    assert not device.registered


def draw(seed):
    """Inputs of each layer, and weights that make keys, values and queries of a layer's output."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, HEADS, TOKENS, SIZE, generator=generator, dtype=torch.float64)
    weights = torch.randn(LAYERS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
    return hidden, [list(layer) for layer in weights]


def through(hidden, weights, attention):
    """A small model without anything but attention: what a layer returns goes into the next."""
    for layer, (q, k, v) in enumerate(weights):
        grouped = hidden[:, ::2]
        hidden = hidden + attention(layer, hidden @ q, grouped @ k, grouped @ v)
    return hidden


def unsplit(seed):
    hidden, weights = draw(seed)
    leaves = [x.requires_grad_() for x in (hidden, *itertools.chain(*weights))]
    output = through(
        hidden, weights, lambda _, *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    )
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def run_chunk(windows, turn, seed, bounds, ranks, slow=lambda layer: None):
    """This rank's part of output and gradients."""
    number = ranks.index(windows.world.rank)
    hidden, weights = draw(seed)
    chunk = hidden[:, :, bounds[number] : bounds[number + 1]].clone().requires_grad_()
    leaves = [chunk, *(x.requires_grad_() for x in itertools.chain(*weights))]
    with WindowKVExchange(windows, turn, bounds, ranks, f"sequence {seed}") as exchange:

        def attention(layer, *qkv):
            slow(layer)
            return context_parallel_attention(*qkv, None, layer, exchange)

        output = through(chunk, weights, attention)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def assert_unsplit(world, seed, bounds, ranks, results):
    """Concatenated outputs and gradients of tokens and summed ones of weights are those of the unsplit sequence."""
    expected = unsplit(seed)
    gathered = world.gather_objects(results)
    parts = [gathered[rank] for rank in ranks]
    assert all(part is not None for part in parts)
    for i, wanted in enumerate(expected):
        got = torch.cat([part[i] for part in parts], 2) if i < 2 else sum(part[i] for part in parts)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def list_splits(world):
    """Sequences with their bounds and ranks, some on all ranks and some on a pair, ranks in any order."""
    size = world.size
    even = tuple(TOKENS * i // size for i in range(size + 1))
    return [
        (1, even, tuple(range(size))),
        (2, (0, 15, TOKENS), (size - 1, 0)),
        (3, even, tuple(reversed(range(size)))),
        (4, (0, 1, TOKENS), (0, size - 1)),
        (5, (0, TOKENS - 1, TOKENS), (1, 0)),
    ]


def assert_sequence_after_sequence(windows, world, slowed=None):
    results = {}
    for turn, (seed, bounds, ranks) in enumerate(list_splits(world), 1):
        if world.rank in ranks:
            slow = (lambda layer: time.sleep(0.03)) if world.rank == slowed else (lambda layer: None)
            results[seed] = run_chunk(windows, turn, seed, bounds, ranks, slow)
    for seed, bounds, ranks in list_splits(world):
        assert_unsplit(world, seed, bounds, ranks, results.get(seed))


@pytest.mark.parametrize("slowed", [None, 0, 1])
def test_sequence_after_sequence_whichever_rank_is_slow(windows, world, slowed):
    """Each time that the others come to a slot or a flag, the slow rank has not."""
    assert windows.sizes.num_bytes == (LAYERS + 2) * TOKENS * TOKEN_BYTES
    assert_sequence_after_sequence(windows, world, slowed)


@pytest.mark.sizes(2, 3)
def test_flags_follow_the_copies_of_a_device(late_windows, world):
    """What has not arrived in a window is NaN, and what is overwritten before it has left is noticed."""
    assert_sequence_after_sequence(late_windows, world)
