"""Measure attention within packed sequences, and the loss with a large vocabulary, on one GPU, with all variants.

    python benchmarks/gpu_attention.py [--parts attention loss] [--rows mixed short] [--variants varlen flex]

Attention is the forward and backward pass of one layer in bf16 with `HEADS` heads and `GROUPS` heads of keys:

    per_sequence         `per_sequence.attend`: a call of `scaled_dot_product_attention` per length
    flash, cudnn         the same with that kernel
    varlen               `varlen.attend`: one call of FlashAttention
    varlen_attn          the same kernel through `torch.nn.attention.varlen`
    cudnn_varlen         cuDNN's kernel with sequence boundaries
    nested               `scaled_dot_product_attention` of nested tensors, after repeating heads of keys and values
    flex                 `flex_attention`, compiled, with a block mask that is computed once per row
    flash_attn           the package of that name

A line for each row of sequences and each variant has medians of milliseconds until the GPU is done and of the launching
thread; milliseconds of the first call, and of the first with other lengths; the peak of additional memory; and the
errors of output and gradients: norm of the difference to float64, divided by the norm. The loss is that of
`ChunkedLogps` with blocks of several sizes, and cross entropy of all logits, which is the reference here.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from odc_mpi.bench.measure import interleaved
from odc_mpi.models import token_logps
from odc_mpi.models.packed import per_sequence, varlen
from odc_mpi.models.token_logps import LogitTransform

DEVICE, TOKENS = "cuda", 8192
HEADS, GROUPS, HEAD_DIM = 16, 4, 128
LOSS_TOKENS, HIDDEN, VOCABULARY = 4096, 2048, 151_936
BLOCKS = {f"blocks_2**{n}": 1 << n for n in (24, 26, 27, 28)}
States = Sequence[torch.Tensor]
Attend = Callable[[States, list[int]], torch.Tensor]


def _draw(low: int, high: int) -> list[int]:
    generator, lengths = torch.Generator().manual_seed(0), [0]
    while sum(lengths) < TOKENS:
        lengths.append(int(torch.randint(low, high + 1, (), generator=generator)))
    return [*lengths[1:-1], TOKENS - sum(lengths[:-1])]


#: Lengths of the sequences of each row.
ROWS = {"one": [TOKENS], "two": [TOKENS // 2] * 2, "equal": [TOKENS // 16] * 16}
ROWS |= {"mixed": _draw(100, 500), "short": _draw(10, 70)}


def _per_sequence(states: States, lengths: list[int], only: SDPBackend | None = None) -> torch.Tensor:
    with sdpa_kernel(only) if only else nullcontext():
        kernel = partial(per_sequence.causal, dropout=0.0, scaling=None, window=None)
        return per_sequence.attend(kernel, *states, lengths, [0] * len(lengths)).transpose(1, 2).contiguous()


def _varlen(states: States, lengths: list[int]) -> torch.Tensor:
    return varlen.attend(*states, lengths, [0] * len(lengths), None, None)


def _bounded(attend: Callable[..., torch.Tensor], states: States, lengths: list[int]) -> torch.Tensor:
    bounds = varlen._bounds(tuple(lengths), states[0].device)
    return attend(*(x[0].transpose(0, 1) for x in states), bounds, bounds, max(lengths), max(lengths))[None]


def _varlen_attn(*given: Any) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(*given, window_size=(-1, 0), **grouped)


def _cudnn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
    return torch.ops.aten._cudnn_attention_forward(q, k, v, None, *given, True, 0.0, True, False)[0]


def _nested(*given: Any) -> torch.Tensor:
    jagged = partial(torch.nested.nested_tensor_from_jagged, offsets=given[3], min_seqlen=1, max_seqlen=given[5])
    q, k, v = (jagged(x.repeat_interleave(HEADS // x.shape[1], 1)).transpose(1, 2) for x in given[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()


def _flash_attn(*given: Any) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(*given, causal=True)


_compiled_flex = torch.compile(flex_attention.flex_attention, dynamic=False)
_masks: dict[tuple[int, ...], Any] = {}


def _flex(states: States, lengths: list[int]) -> torch.Tensor:
    if tuple(lengths) not in _masks:
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(DEVICE)
        _masks[tuple(lengths)] = flex_attention.create_block_mask(
            lambda batch, head, i, j: (i >= j) & (sequence[i] == sequence[j]), None, None, *[len(sequence)] * 2, DEVICE
        )
    return _compiled_flex(*states, block_mask=_masks[tuple(lengths)], enable_gqa=True).transpose(1, 2)


VARIANTS: dict[str, Attend] = {
    "per_sequence": _per_sequence,
    "flash": partial(_per_sequence, only=SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(_per_sequence, only=SDPBackend.CUDNN_ATTENTION),
    "varlen": _varlen,
    "varlen_attn": partial(_bounded, _varlen_attn),
    "nested": partial(_bounded, _nested),
    "flex": _flex,
    "flash_attn": partial(_bounded, _flash_attn),
    "cudnn_varlen": partial(_bounded, _cudnn_varlen),
}


def exact(states: States, lengths: list[int], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of attention in float64, computed for a sequence and a group of heads at a time."""
    results = [torch.empty_like(x, dtype=torch.float64) for x in (states[0], *states)]
    begin = 0
    for length in lengths:
        here = slice(begin, begin := begin + length)
        future = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
        for group in range(GROUPS):
            heads, own = slice(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS), slice(group, group + 1)
            parts = (heads, own, own)
            q, k, v = (x[0, p, here].detach().double().requires_grad_() for x, p in zip(states, parts, strict=True))
            scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(future, -torch.inf)
            output = scores.softmax(-1) @ v
            found = (output, *torch.autograd.grad(output, (q, k, v), upstream[0, here, heads].transpose(0, 1).double()))
            for result, part, value in zip(results, (heads, *parts), found, strict=True):
                result[0, part, here] = value.detach()
    return results


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds from the first launch until the GPU is done, and those of the launching thread."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = perf_counter()
    begin.record()
    work()
    end.record()
    launched = perf_counter() - began
    end.synchronize()
    return begin.elapsed_time(end), launched * 1e3


def first(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call once; return the result, milliseconds, and the peak of additional memory in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, (perf_counter() - began) * 1e3, (torch.cuda.max_memory_allocated() - before) / 2**20


def report(figures: Sequence[float], found: States, wanted: States) -> str:
    """Return the start of a line: first milliseconds, memory, and errors."""
    errors = (float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    return "".join(f"{figure:10.1f}" for figure in figures) + "   " + " ".join(f"{error:.1e}" for error in errors)


def show(name: str, line: str, times: Sequence[tuple[float, float]]) -> None:
    """Print a line."""
    print(f"{name:20}" + "".join(f"{median(column):10.3f}" for column in zip(*times, strict=True)) + line, flush=True)


def attention(options: argparse.Namespace) -> None:
    """Measure the variants on all rows."""
    print(f"{'':20}        ms launch_ms  first_ms  other_ms       MiB   errors of output, q, k, v")
    for row in options.rows:
        lengths = ROWS[row]
        torch.manual_seed(0)
        flat = [torch.randn(1, TOKENS, n, HEAD_DIM, device=DEVICE).bfloat16() for n in (HEADS, GROUPS, GROUPS)]
        states = [x.transpose(1, 2).requires_grad_() for x in flat]  # as a model computes them
        upstream = torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        wanted = exact(states, lengths, upstream)
        works, lines = {}, {}

        def run(attend: Attend, lengths: list[int], states: States = states, upstream: torch.Tensor = upstream) -> Any:
            output = attend([x[:, :, : sum(lengths)] for x in states], lengths)
            return output, *torch.autograd.grad(output, states, upstream[:, : sum(lengths)])

        for name in options.variants:
            work = partial(run, VARIANTS[name], lengths)
            other = lengths if name == "flex" else [max(1, n - 1) for n in lengths]
            try:
                (output, *gradients), first_ms, peak = first(work)
                _, other_ms, _ = first(partial(run, VARIANTS[name], other))
            except Exception as error:
                print(f"{row} {name} failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
                continue
            found = (output.transpose(1, 2), *gradients)
            works[name], lines[name] = work, report((first_ms, other_ms, peak), found, wanted)
        times = interleaved({name: partial(timed, work) for name, work in works.items()}, options.repeats)
        for name, line in lines.items():
            show(f"{row} {name}", line, times[name])


def loss(options: argparse.Namespace) -> None:
    """Measure the loss in blocks of several sizes, and of all logits."""
    torch.manual_seed(0)
    hidden = torch.randn(LOSS_TOKENS, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, device=DEVICE) / HIDDEN**0.5).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (LOSS_TOKENS,), device=DEVICE)

    def run(elements: int | None) -> Any:
        if elements is None:
            value = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        else:
            token_logps.MAX_ELEMENTS[DEVICE] = elements
            value = -token_logps.ChunkedLogps.apply(hidden, weight, None, targets, LogitTransform())[0].mean()
        return value, *torch.autograd.grad(value, (hidden, weight))

    wanted = [x.detach().double() for x in run(None)]
    print(f"{'':20}        ms launch_ms  first_ms       MiB   differences of loss, hidden, weight")
    for name, elements in {**BLOCKS, "all_logits": None}.items():
        work = partial(run, elements)
        found, *figures = first(work)
        line = report(figures, found, wanted)
        del found
        show(name, line, [timed(work) for _ in range(options.repeats)])


def main() -> None:
    """Measure the parts."""
    parts = {"attention": attention, "loss": loss}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("parts", parts), ("rows", ROWS), ("variants", VARIANTS)):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for name in options.parts:
        parts[name](options)


if __name__ == "__main__":
    main()
