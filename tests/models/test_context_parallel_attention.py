"""Attention of chunks, which wait for each other in threads, against torch's on the unsplit sequence; which models."""

import threading
from concurrent.futures import Future

import pytest
import tiny_qwen2
import torch
import torch.nn.functional as F
from packed_models import LargestTensor
from ranks import run_threads
from user_errors import refused

from odc_mpi.models import context_parallel_attention
from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.build import from_config
from odc_mpi.models.context_parallel_attention import _Kernel, attention_shape

HEADS, GROUPS, SIZE = 4, 2, 8
WAIT_S = 20
SIZES = tiny_qwen2.SIZES | {"num_hidden_layers": 3}
CUTS = [(0, 13), (0, 7, 13), (0, 1, 13), (0, 12, 13), (0, 5, 9, 13), (0, 6, 8, 10, 13)]


def draw(dtype=torch.float32, tokens=13, size=SIZE):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, size) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class ThreadKVExchange:
    """Exchange of chunk `number` of `count`, each in a thread, by futures in a dictionary, without windows."""

    def __init__(self, futures, number, count):
        self.futures, self.number, self.count = futures, number, count

    def future(self, *key):
        return self.futures.setdefault(key, Future())

    def publish_kv(self, layer, kv):
        if not (published := self.future("kv", layer, self.number)).done():
            published.set_result([x.detach().clone() for x in kv])

    def earlier_kv(self, layer):
        return (self.future("kv", layer, number).result(WAIT_S) for number in range(self.number))

    def send_kv_grads(self, layer, grads):
        for number, gradient in zip(range(self.number), grads, strict=True):
            self.future("grads", layer, self.number, number).set_result(gradient)

    def accumulate_kv_grads(self, layer, grads):
        later = [self.future("grads", layer, n, self.number).result(WAIT_S) for n in range(self.number + 1, self.count)]
        return tuple(sum(parts) for parts in zip(grads, *later, strict=True))


def unsplit(inputs, upstream, scaling):
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scaling, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def in_chunks(inputs, upstream, scaling, cuts):
    futures, count = {}, len(cuts) - 1

    def work(number):
        exchange = ThreadKVExchange(futures, number, count)
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
    *inputs, upstream = draw(tokens=512)
    futures = {}
    first = [x[:, :, :256] for x in inputs]
    ThreadKVExchange(futures, 0, 2).publish_kv(0, first[1:])
    leaves = [x[:, :, 256:].clone().requires_grad_() for x in inputs]
    with LargestTensor() as made:
        exchange = ThreadKVExchange(futures, 1, 2)
        output = context_parallel_attention.context_parallel_attention(*leaves, None, 0, exchange)
        output.backward(upstream[:, :, 256:])
    assert 0 < made.numel <= 256 * HEADS * SIZE < 256 * 256


@pytest.fixture
def gpu_kernels():
    """The operators for GPUs on the host, with what their kernels require of the arguments."""
    aten, calls = torch.ops.aten, []
    seed = torch.zeros(2, dtype=torch.uint64)

    def attend(query, key, value, causal, scale):
        for x in (query, key, value):
            assert x.shape[3] == query.shape[3] and x.shape[3] % 8 == 0 and x.stride(3) == 1
        calls.append(query.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)

    def attend_backward(grad, query, key, value, output, lse, causal, scale):
        for x in (grad, query, key, value, output):
            assert x.shape[3] == query.shape[3] and x.shape[3] % 8 == 0 and x.stride(3) == 1
        calls.append(query.dtype)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, query, key, value, output, lse, 0.0, causal, scale=scale)

    def flash(query, key, value, dropout=0.0, causal=False, debug=False, *, scale):
        output, lse = attend(query, key, value, causal, scale)
        return output, lse.contiguous(), None, None, query.shape[2], key.shape[2], seed, seed, seed

    def flash_backward(grad, query, key, value, output, lse, q, k, max_q, max_k, dropout, causal, *_, scale):
        assert q is k is None and (max_q, max_k) == (query.shape[2], key.shape[2]) and lse.is_contiguous()
        return attend_backward(grad, query, key, value, output, lse, causal, scale)

    def efficient(query, key, value, bias, with_lse, dropout=0.0, causal=False, *, scale):
        assert bias is None and with_lse and query.shape[1] == key.shape[1]
        output, lse = attend(query, key, value, causal, scale)
        return output, F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), seed, seed

    def efficient_backward(
        grad, query, key, value, bias, output, lse, seed, offset, dropout, needed, causal=False, *, scale
    ):
        assert query.shape[1] == key.shape[1] and output.transpose(1, 2).is_contiguous()
        assert lse.shape[2] % 32 == 0 and lse[:, :, query.shape[2] :].eq(torch.inf).all()
        assert bias is None and needed == [True, True, True, False]
        return *attend_backward(grad, query, key, value, output, lse[:, :, : query.shape[2]], causal, scale), None

    library = torch.library.Library("aten", "IMPL")
    for function in (flash, flash_backward, efficient, efficient_backward):
        name, _, direction = function.__name__.partition("_")
        suffix = f"_{direction}" if direction else ""
        library.impl(f"_scaled_dot_product_{name}_attention{suffix}", function, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("kernel", [_Kernel.FLASH, _Kernel.EFFICIENT])
@pytest.mark.parametrize("size", [8, 6])
def test_arguments_of_the_kernels_for_gpus(gpu_kernels, monkeypatch, kernel, size):
    """Rows of 6 are padded to 8; for the second kernel heads of keys are repeated, and log-sum-exps padded to 32."""
    *inputs, upstream = draw(tokens=70, size=size)
    expected = unsplit(inputs, upstream, None)
    monkeypatch.setattr(context_parallel_attention, "_choose_kernel", lambda query: kernel)
    for one, other in zip(in_chunks(inputs, upstream, None, (0, 32, 70)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len(gpu_kernels) == 6


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "kernel"),
    [
        (torch.float32, 64, (7, 5), _Kernel.EFFICIENT),
        (torch.bfloat16, 256, (9, 0), _Kernel.FLASH),
        (torch.bfloat16, 264, (8, 0), _Kernel.EFFICIENT),
        (torch.bfloat16, 64, (7, 5), None),
    ],
)
def test_the_kernel_for_a_gpu(monkeypatch, dtype, size, capability, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = torch.empty(1, 2, 3, size, dtype=dtype, device="meta")
    if kernel is not None:
        assert context_parallel_attention._choose_kernel(query) is kernel
        return
    refused("bfloat16...compute capability 8.0 or more, got 7.5", context_parallel_attention._choose_kernel, query)


def compute_shape(settings, num_tokens=100):
    return attention_shape(from_config(settings, 0).module, num_tokens)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "olmo2"])
def test_models_with_context_parallelism(kind):
    head_dim = 128 if kind == "qwen3" else 8  # its default, whatever the hidden size
    assert compute_shape({"model_type": kind, **SIZES}) == (3, 2 * 2 * head_dim)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("mistral", {"sliding_window": 99}, "a window of 99 tokens"),
        ("llama", {"attention_dropout": 0.1}, "dropout of attention weights"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary frequencies depend on the length: dynamic",
        ),
        ("mixtral", {"output_router_logits": True}, "balance of experts"),
    ],
)
def test_models_without_context_parallelism(kind, settings, words):
    refused(words, compute_shape, {"model_type": kind, **SIZES, **settings}, error=ContextParallelUnsupportedError)


def test_a_window_that_holds_the_longest_sequence_is_none():
    assert compute_shape({"model_type": "mistral", **SIZES, "sliding_window": 100})[0] == 3
