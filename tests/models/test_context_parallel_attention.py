"""Attention of chunks, which wait for each other in threads, against torch's on the unsplit sequence."""

import threading

import kv_exchange_threads
import pytest
import torch
import torch.nn.functional as F
from ranks import run_threads

from odc_mpi.models import context_parallel_attention

HEADS, GROUPS, SIZE = 4, 2, 8
CUTS = [(0, 13), (0, 7, 13), (0, 1, 13), (0, 12, 13), (0, 5, 9, 13), (0, 6, 8, 10, 13)]


def draw(dtype=torch.float32, tokens=13):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def unsplit(inputs, upstream, scaling):
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scaling, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def in_chunks(inputs, upstream, scaling, cuts):
    board, count = kv_exchange_threads.Board(), len(cuts) - 1

    def work(number):
        exchange = kv_exchange_threads.ThreadKVExchange(board, number, count)
        tokens = slice(cuts[number], cuts[number + 1])
        leaves = [x[:, :, tokens].clone().requires_grad_() for x in inputs]
        output = context_parallel_attention.context_parallel_attention(*leaves, scaling, 0, exchange)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream[:, :, tokens])]

    chunks = run_threads(count, work, threading.Barrier(count))
    return [torch.cat(parts, 2) for parts in zip(*chunks, strict=True)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients_are_those_of_the_unsplit_sequence(cuts, scaling):
    *inputs, upstream = draw()
    expected = unsplit(inputs, upstream, scaling)
    for one, other in zip(in_chunks(inputs, upstream, scaling, cuts), expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_in_bf16_the_distance_to_the_exact_result_is_that_of_the_unsplit_sequence():
    """Of each array, by its norm: both round to bf16, at other places."""
    *inputs, upstream = draw(torch.bfloat16, 64)
    exact = unsplit([x.double() for x in inputs], upstream.double(), None)
    bound = [(one - other.double()).norm() for one, other in zip(exact, unsplit(inputs, upstream, None), strict=True)]
    got = in_chunks(inputs, upstream, None, (0, 30, 50, 64))
    for one, other, distance in zip(got, exact, bound, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 3 * distance


def test_no_matrix_of_tokens_by_tokens_is_made():
    """The largest tensor of any operator has at most the elements of the query in fp32, not those of a mask."""
    tokens, largest = 512, 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            each = made if isinstance(made, tuple | list) else [made]
            largest = max([largest, *(x.numel() for x in each if isinstance(x, torch.Tensor))])
            return made

    *inputs, upstream = draw(tokens=tokens)
    board = kv_exchange_threads.Board()
    first = [x[:, :, :256] for x in inputs]
    kv_exchange_threads.ThreadKVExchange(board, 0, 2).publish_kv(0, first[1:])
    leaves = [x[:, :, 256:].clone().requires_grad_() for x in inputs]
    with Largest():
        output = context_parallel_attention.context_parallel_attention(
            *leaves, None, 0, kv_exchange_threads.ThreadKVExchange(board, 1, 2)
        )
        output.backward(upstream[:, :, 256:])
    assert 0 < largest <= 256 * HEADS * SIZE < 256 * 256
