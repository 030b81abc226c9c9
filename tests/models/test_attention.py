"""Packed attention against the full score matrix, written out."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from user_errors import refused

from odc_mpi.models.attention import (
    ContextParallelUnsupportedError,
    PackingUnsupportedError,
    _local_pattern,
    packed_attention,
)
from odc_mpi.models.packed import per_sequence, varlen

HEADS, GROUPS, SIZE = 4, 2, 8
unpacked = partial(refused, error=PackingUnsupportedError)


def written_out(query, key, value, boundaries, window=None, sinks=None):
    """The full matrix of scores, masked to causal blocks, with the sinks in a last column."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * SIZE**-0.5
    tokens = torch.arange(query.shape[2])
    sequence = torch.bucketize(tokens, torch.tensor(boundaries[1:]), right=True)
    distance = tokens[:, None] - tokens[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, len(tokens), 1)], 3)
    return (scores.softmax(-1)[..., : len(tokens)] @ value).transpose(1, 2)


def assert_same(actual, wanted, inputs):
    """The outputs are equal, and so are their gradients."""
    torch.testing.assert_close(actual, wanted)
    upstream = torch.randn_like(wanted)
    got, expected = (torch.autograd.grad(x, inputs, upstream) for x in (actual, wanted))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def draw(num_tokens, batch=1):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(batch, heads, num_tokens, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("boundaries", [[0, 12], [0, 1, 12], [0, 5, 6, 12], list(range(13))])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_values_and_gradients(boundaries, window, eager):
    inputs = draw(12)
    bounds = torch.tensor(boundaries, dtype=torch.int32)
    actual, weights = packed_attention(None, *inputs, None, sliding_window=window, cu_seq_lens_q=bounds, eager=eager)
    assert weights is None
    assert_same(actual, written_out(*inputs, boundaries, window), inputs)


@pytest.mark.parametrize(
    ("most", "calls"), [(4096, [(1, 1), (2, 3), (3, 2)]), (5, [(1, 1), (1, 2), (1, 3), (1, 3), (2, 2)])]
)
def test_sequences_of_one_length_are_one_call(monkeypatch, most, calls):
    monkeypatch.setattr(per_sequence, "_MAX_TOKENS", most)
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counting(q, *args, **kwargs):
        seen.append((q.shape[0], q.shape[2]))
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    boundaries = [0, 3, 5, 6, 8, 11, 13]
    inputs, bounds = draw(13), torch.tensor(boundaries, dtype=torch.int32)
    actual, _ = packed_attention(None, *inputs, None, cu_seq_lens_q=bounds)
    assert sorted(seen) == sorted(calls)
    torch.testing.assert_close(actual, written_out(*inputs, boundaries))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position_bias": torch.ones(HEADS)}, "position_bias"),
        ({"is_causal": False}, "a layer that is not causal"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "an attention mask"),
        ({"cu_seq_lens_q": None}, "no sequence boundaries"),
    ],
)
def test_what_would_change_the_result_is_refused(given, words):
    given = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 4]), **given}
    words = f"packed attention supports only plain causal layers...{words}"
    unpacked(words, packed_attention, None, *draw(4), **given)


@pytest.mark.parametrize("output", [None, 3, 9])
def test_a_window_in_the_mask_counts(output):
    inputs, boundaries = draw(12), [0, 1, 12]
    bounds = torch.tensor(boundaries, dtype=torch.int32)
    mask = _local_pattern(local_size=3, config=SimpleNamespace(sliding_window=3))
    actual, _ = packed_attention(None, *inputs, mask, sliding_window=output, cu_seq_lens_q=bounds)
    torch.testing.assert_close(actual, written_out(*inputs, boundaries, 3))


def test_chunks_in_the_mask_begin_with_each_sequence():
    inputs = draw(12)
    mask = _local_pattern(local_size=4, config=SimpleNamespace(attention_chunk_size=4, sliding_window=None))
    actual, _ = packed_attention(None, *inputs, mask, cu_seq_lens_q=torch.tensor([0, 1, 12]))
    torch.testing.assert_close(actual, written_out(*inputs, [0, 1, 5, 9, 12]))


def test_patterns_that_are_not_known_are_refused():
    assert _local_pattern() is None
    unpacked("a model-specific mask", _local_pattern, use_vmap=True)
    both = SimpleNamespace(attention_chunk_size=3, sliding_window=3)
    unpacked("a local mask of unknown kind", _local_pattern, local_size=3, config=both)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_sinks_take_part_in_the_softmax(window, eager):
    inputs, boundaries = draw(12), [0, 4, 5, 12]
    sinks = torch.linspace(-1, 2, HEADS).requires_grad_()
    actual, _ = packed_attention(
        None, *inputs, None, sliding_window=window, cu_seq_lens_q=torch.tensor(boundaries), s_aux=sinks, eager=eager
    )
    assert_same(actual, written_out(*inputs, boundaries, window, sinks), [*inputs, sinks])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"s_aux": torch.ones(HEADS)}, "attention sinks"),
        ({"attention_mask": torch.tensor([0, 4])}, "chunks of 4 tokens"),
        ({"softcap": 30.0}, "eager"),
        ({"attention_mask": torch.tensor([4, 0])}, "a window of 4 tokens"),
    ],
)
def test_a_chunk_of_a_split_sequence_refuses_other_attention(given, words):
    given = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 4]), **given}
    given["chunk"] = SimpleNamespace(num_tokens=9)
    refused(words, packed_attention, None, *draw(4), **given, error=ContextParallelUnsupportedError)


class FakeVarlen:
    """Computes what the kernel for variable lengths computes; keeps the boundaries that it was given."""

    def __init__(self):
        self.bounds = []

    def __call__(self, query, key, value, bounds_q, bounds_k, max_q, max_k, dropout, causal, debug, **options):
        assert (dropout, causal, debug, options["window_size_right"]) == (0.0, True, False, 0)
        assert (bounds_q.diff().max(), bounds_k.diff().max(), bounds_q.dtype) == (max_q, max_k, torch.int32)
        self.bounds.append((bounds_q, bounds_k))
        key, value = (states.repeat_interleave(HEADS // GROUPS, 1) for states in (key, value))
        tokens, keys = torch.arange(len(query)), torch.arange(len(key))
        sequence = torch.bucketize(tokens, bounds_q[1:], right=True)
        at = tokens + (bounds_k - bounds_q)[sequence + 1]  # the key of each token
        seen = (keys <= at[:, None]) & (keys >= bounds_k[sequence][:, None])
        if (left := options["window_size_left"]) is not None:
            seen &= at[:, None] - keys <= left
        scores = torch.einsum("qhd,khd->hqk", query, key) * (options["scale"] or SIZE**-0.5)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value), None


@pytest.fixture
def fake_varlen(monkeypatch):
    monkeypatch.setattr(varlen, "_forward", kernel := FakeVarlen())
    monkeypatch.setattr(varlen, "is_supported", lambda *states: True)
    return kernel


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize("prompts", [[0, 0, 0], [0, 4, 0], [0, 2, 5]])
def test_one_call_for_all_lengths(monkeypatch, fake_varlen, window, scaling, prompts):
    inputs, bounds = draw(12), torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    given = {"cu_seq_lens_k": bounds + torch.tensor([0, *prompts]).cumsum(0), "sliding_window": window}
    given |= {"cu_seq_lens_q": bounds, "scaling": scaling}
    actual, again = (packed_attention(None, *inputs, None, **given)[0] for _ in range(2))
    assert torch.equal(actual, again)
    assert len({id(part) for call in fake_varlen.bounds for part in call}) == 1 + any(prompts), "copied once"
    monkeypatch.undo()
    assert_same(actual, packed_attention(None, *inputs, None, **given)[0], inputs)


@pytest.mark.parametrize(
    "given",
    [
        {"dropout": 0.1},
        {"softcap": 30.0},
        {"eager": True},
        {"s_aux": torch.ones(HEADS)},
        {"attention_mask": torch.tensor([0, 4])},
        {"cu_seq_lens_q": torch.tensor([0, 12])},
    ],
    ids=lambda given: next(iter(given)),
)
def test_other_features_are_calls_per_sequence(monkeypatch, fake_varlen, given):
    monkeypatch.setattr(varlen, "PLANNED_MULTIPLE", 12)
    packed_attention(None, *draw(12), **{"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 5, 12]), **given})
    assert fake_varlen.bounds == []


def test_the_kernel_of_this_torch_has_the_arguments_and_gradients():
    inputs = [states.detach().to("meta", torch.bfloat16).requires_grad_() for states in draw(12)]
    output = varlen.attend(*inputs, [5, 1, 6], [0, 4, 0], 0.5, 3)
    assert (output.shape, output.dtype) == ((1, 12, HEADS, SIZE), torch.bfloat16)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert [gradient.shape for gradient in gradients] == [states.shape for states in inputs]
    assert not varlen.is_supported(*inputs)
