"""Completions of a batch: sampled from the policy's own distribution, independent of the others in the batch."""

import numpy as np
import pytest
import torch
from packed_models import packed_model, plain_completion, plain_model
from tiny_configurations import tiny_config
from transformers import AutoModelForCausalLM

from odc_mpi.generation.generate import SamplingParams
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.rollout.sample import RolloutSamplingParams, _inverse_cdf, _truncation, sample

STOP = (3, 7, 11, 30)
PROMPTS = [Prompt(4, [5, 7, 9], STOP), Prompt(9, list(range(1, 12)), STOP), Prompt(2, [60], STOP)]
SAMPLING = RolloutSamplingParams(num_generations=3, max_completion_length=12, temperature=0.8, seed=3, step=2)


def completed(model, prompts, sampling=SAMPLING):
    found = {}
    sample(model, prompts, sampling, lambda i, made: found.__setitem__(prompts[i].number, made))
    return found


def test_a_completion_is_the_same_in_any_batch():
    model = packed_model()
    state = torch.get_rng_state()
    together = completed(model, PROMPTS)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    for prompt in PROMPTS:
        alone = completed(model, [prompt])[prompt.number]
        made = together[prompt.number]
        assert alone.tokens == made.tokens and alone.stopped == made.stopped
        for tokens, stopped in zip(made.tokens, made.stopped, strict=True):
            assert stopped == (tokens[-1] in STOP) and not set(STOP) & set(tokens[:-1])
            assert stopped or len(tokens) == SAMPLING.max_completion_length
    assert len({tuple(tokens) for made in together.values() for tokens in made.tokens}) > 6


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}])
def test_a_prompt_is_computed_once_and_completions_that_ended_are_left_out(monkeypatch, changes):
    model = packed_model(**changes)
    sampling = RolloutSamplingParams(num_generations=8, max_completion_length=20, seed=1)
    shapes = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    found = completed(model, PROMPTS, sampling)
    assert shapes[0] == (3, 10) and {tokens for _, tokens in shapes[1:]} == {1}
    rows = [rows for rows, _ in shapes[1:]]
    assert len(rows) == 20 and rows == sorted(rows, reverse=True)
    lengths = [len(tokens) for made in found.values() for tokens in made.tokens]
    for drawn, decoded in enumerate(rows):
        left = sum(length > drawn for length in lengths)
        assert left <= decoded and (decoded < 2 * left or decoded < 16), "more than half of them have ended"
    monkeypatch.setattr("odc_mpi.rollout.sample._MIN_ROWS", 1000)
    together = completed(model, PROMPTS, sampling)
    for number, made in found.items():
        assert together[number].tokens == made.tokens and together[number].stopped == made.stopped
        for one, other in zip(together[number].logps, made.logps, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
        assert together[number].entropy == pytest.approx(made.entropy)


def test_steps_and_seeds_draw_others():
    model = packed_model()
    usual = completed(model, PROMPTS[:1])[4].tokens
    for change in ({"step": 3}, {"seed": 4}):
        assert completed(model, PROMPTS[:1], RolloutSamplingParams(**(vars(SAMPLING) | change)))[4].tokens != usual


def test_greedy_is_transformers_own():
    plain, packed = plain_model(), packed_model()
    greedy = RolloutSamplingParams(num_generations=1, max_completion_length=9, temperature=0.0)
    found = completed(packed, PROMPTS, greedy)
    for prompt in PROMPTS:
        wanted = plain_completion(plain, prompt.tokens, 0, SamplingParams(max_new_tokens=9), stop=sorted(STOP))
        assert found[prompt.number].tokens == [wanted]


def test_tokens_are_drawn_by_their_probabilities():
    probabilities = torch.tensor([[0.0, 0.2, 0.5, 0.3, 0.0]], dtype=torch.float64)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampled = _inverse_cdf(probabilities.expand(1000, 5).contiguous(), uniforms)
    assert torch.bincount(sampled, minlength=5).tolist() == [0, 200, 500, 300, 0]
    # Rounding may leave the sum short of a number that is almost 1.
    assert _inverse_cdf(probabilities, torch.tensor([1.0], dtype=torch.float64)).tolist() == [3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(0, 1.0, [1, 2, 3, 4]), (2, 1.0, [2, 3]), (0, 0.75, [2, 3]), (3, 0.6, [2, 3])]
)
def test_unlikely_tokens_are_left_out(top_k, top_p, kept):
    logps = torch.tensor([[0.0, 0.15, 0.5, 0.3, 0.05]], dtype=torch.float64).log()
    found = _truncation(RolloutSamplingParams(1, 1, top_k=top_k, top_p=top_p))(None, logps).exp()
    assert torch.nonzero(found[0])[:, 0].tolist() == kept


OTHERS = ("lfm2", "dory", "git", "moshi", "recurrent_gemma", "xlstm")


@pytest.mark.parametrize("family", ["mamba", "rwkv", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_a_model_that_does_not_decode_batches_decodes_one_prompt_as_without_a_cache(monkeypatch, family):
    monkeypatch.setattr("odc_mpi.rollout.sample._MIN_ROWS", 4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # for outputs that depend on all tokens
            parameter.copy_(3 * parameter if parameter.ndim >= 2 else parameter + 0.1 * torch.randn_like(parameter))
    model.generation_config.use_cache = False
    assert not decodes_batches(model)
    for prompt in PROMPTS:
        found = completed(model, [prompt], RolloutSamplingParams(4, 12, temperature=0.0))
        wanted = plain_completion(model, list(prompt.tokens), 0, SamplingParams(12), list(STOP))
        assert found[prompt.number].tokens == [wanted] * 4
