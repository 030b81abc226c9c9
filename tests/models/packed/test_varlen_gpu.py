"""Packed attention in 16 bits on a GPU against float64; elsewhere skipped, unless ODC_MPI_REQUIRE_GPU=1."""

import pytest
import torch

from odc_mpi.models.attention import packed_attention
from odc_mpi.models.packed import varlen

pytestmark = pytest.mark.usefixtures("gpu")


#: Lengths of sequences and of the prompts that they share.
ROWS = {
    "mixed": ([700, 24, 1, 300], [0, 0, 0, 0]),
    "short": (list(range(1, 60)), [0] * 59),
    "single tokens": ([1] * 50, [0] * 50),
    "shared prompts": ([300, 200, 150, 20, 30], [0, 100, 250, 0, 10]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(4, 4, 64), (16, 4, 128), (4, 1, 256)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("row", ROWS)
def test_one_call_on_a_gpu(monkeypatch, dtype, sizes, window, row):
    heads, groups, head_dim = sizes
    lengths, prompts = ROWS[row]
    torch.manual_seed(0)
    flat = [torch.randn(1, sum(lengths), n, head_dim, device="cuda", dtype=dtype) for n in (heads, groups, groups)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds + torch.tensor([0, *prompts]).cumsum(0)}
    calls, forward = [], varlen._forward
    monkeypatch.setattr(varlen, "_forward", lambda *args, **options: calls.append(1) or forward(*args, **options))

    def attend(states):
        states = [x.transpose(1, 2).detach().requires_grad_() for x in states]
        output, _ = packed_attention(None, *states, None, sliding_window=window, **given)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        return output, *torch.autograd.grad(output, states, upstream)

    found = attend(flat)
    assert calls == [1]
    wanted = attend([x.double() for x in flat])
    assert calls == [1], "float64 is not supported"
    for one, other in zip(found, wanted, strict=True):
        # Gradients of queries and keys are 0 if every sequence has one token.
        assert (one.double() - other).norm() < 1e-2 * other.norm() + 1e-3 * wanted[0].norm()
