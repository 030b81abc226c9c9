"""Completions of a batch: sampled from the policy's own distribution, independent of the others in the batch."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from packed_models import greedy_completion, packed_model, plain_model
from tiny_configurations import tiny_config
from transformers import AutoModelForCausalLM

from odc_mpi.models.decoding import Prompt
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.rollout.decode import Decoder, decode_claimed, prompt_batch, sample
from odc_mpi.rollout.sampling import RolloutSamplingParams, TokenSampler, inverse_cdf, token_warpers

STOP = (3, 7, 11, 30)
PROMPTS = [Prompt(4, [5, 7, 9], STOP), Prompt(9, list(range(1, 12)), STOP), Prompt(2, [60], STOP)]
SAMPLING = RolloutSamplingParams(num_generations=3, max_completion_length=12, temperature=0.8, seed=3)


def completed(model, prompts, sampling=SAMPLING, step=2):
    found = {}
    sample(model, prompts, sampling, lambda i, made: found.__setitem__(prompts[i].number, made), step)
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
    monkeypatch.setattr("odc_mpi.rollout.decode._MIN_ROWS", 1000)
    together = completed(model, PROMPTS, sampling)
    for number, made in found.items():
        assert together[number].tokens == made.tokens and together[number].stopped == made.stopped
        for one, other in zip(together[number].logps, made.logps, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
        assert together[number].entropy == pytest.approx(made.entropy)


def refilled(model, prompts, max_prompts, sampling=SAMPLING, interrupt=lambda batch, token: None):
    """Completions of prompts that take each other's places in a batch of `max_prompts`."""
    found, waiting, rows = {}, iter(prompts), []
    batch = prompt_batch(model, sampling, max_prompts, found.__setitem__)

    def claim(count):
        return {prompt.number: prompt for prompt in itertools.islice(waiting, count)}

    def on_token(token):
        active = sum(not each.has_ended for prompt in batch.prompts.values() for each in prompt.completions)
        rows.append(active)
        interrupt(batch, token)

    decode_claimed(batch, claim, 2, on_token)
    assert max(rows) == min(max_prompts, len(prompts)) * sampling.num_generations
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for number, completions in wanted.items():
        assert found[number].tokens == completions.tokens and found[number].stopped == completions.stopped
        for one, other in zip(found[number].logps, completions.logps, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


MANY = [Prompt(i, list(range(1, 2 + (7 * i) % 13)), STOP) for i in range(9)]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}])
@pytest.mark.parametrize("max_prompts", [1, 2, 5])
def test_prompts_take_the_place_of_those_that_have_ended(monkeypatch, changes, max_prompts):
    monkeypatch.setattr("odc_mpi.rollout.decode._MIN_ROWS", 4)
    model = packed_model(**changes)
    wanted = completed(model, MANY)
    assert_same(refilled(model, MANY, max_prompts), wanted)

    def recompute(batch, token):
        if token % 3 == 0:
            batch.recompute()

    monkeypatch.setattr("odc_mpi.rollout.decode._MAX_PREFILL_TOKENS", 40)
    assert_same(refilled(model, MANY, max_prompts, interrupt=recompute), wanted)


def test_columns_that_no_row_uses_are_dropped(monkeypatch):
    monkeypatch.setattr("odc_mpi.rollout.decode._MIN_ROWS", 1)
    model, longest = packed_model(), []
    refilled(model, MANY, 2, interrupt=lambda batch, token: longest.append(batch._mask.shape[1]))
    assert max(longest) < 2 * (13 + SAMPLING.max_completion_length), "columns of prompts that have ended are kept"


def test_completions_in_progress_go_on_with_other_parameters():
    """Tokens after a change of parameters are those of the new ones; with `recompute`, also given the earlier ones."""
    model, other = packed_model(), packed_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    state = {name: value.clone() for name, value in other.state_dict().items()}
    sampling = RolloutSamplingParams(2, 10, seed=5)
    prompts = [Prompt(1, [5, 7, 9], ()), Prompt(2, [8, 1, 4, 4, 6], ())]
    for recomputes in (False, True):
        changed = packed_model()

        def change(batch, token, changed=changed, recomputes=recomputes):
            if token == 5:
                changed.load_state_dict(state)
                if recomputes:
                    batch.recompute()

        found = refilled(changed, prompts, 2, sampling, change)
        before = refilled(model, prompts, 2, sampling)
        for number, completions in found.items():
            for tokens, logps, old in zip(completions.tokens, completions.logps, before[number].tokens, strict=True):
                assert tokens[:4] == old[:4] and tokens != old
                with torch.no_grad():
                    whole = torch.tensor([[*prompts[number - 1].tokens, *tokens]])
                    other.eval().set_attn_implementation("sdpa")
                    all_logps = other(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)
                first = len(prompts[number - 1].tokens) - 1
                expected = all_logps[first : first + 10].gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
                assert np.allclose(logps[4:], expected[4:], atol=1e-5) == recomputes


def test_repeated_tokens_are_penalized_as_in_transformers():
    model = plain_model()
    sampling = RolloutSamplingParams(1, 12, temperature=0.0, repetition_penalty=1.7)
    found = refilled(model, PROMPTS, 3, sampling)
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt.tokens])
        settings = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.7, "pad_token_id": 0}
        wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), eos_token_id=list(STOP), **settings)
        assert found[prompt.number].tokens == [wanted[0, len(prompt.tokens) :].tolist()]


def test_the_log_probability_of_a_token_is_that_of_the_policy_whatever_limits_sampling():
    scores = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    for changes in ({}, {"top_k": 2}, {"min_p": 0.3}, {"repetition_penalty": 1.5}):
        sampling = RolloutSamplingParams(1, 3, temperature=0.7, **changes)
        batch = Decoder.__new__(Decoder)
        batch.module, batch._sampling, batch.prompts = plain_model(), sampling, {}
        [completion] = batch._start({0: Prompt(0, [0, 1], ())}, 1)
        TokenSampler(sampling).extend([completion], scores, 1)
        expected = (scores[0] / 0.7).log_softmax(-1)[completion.tokens[0]]
        assert completion.logps == [pytest.approx(expected.item())]


def test_steps_and_seeds_draw_others():
    model = packed_model()
    usual = completed(model, PROMPTS[:1])[4].tokens
    assert completed(model, PROMPTS[:1], step=3)[4].tokens != usual
    assert completed(model, PROMPTS[:1], dataclasses.replace(SAMPLING, seed=4))[4].tokens != usual


def test_greedy_is_transformers_own():
    plain, packed = plain_model(), packed_model()
    greedy = RolloutSamplingParams(num_generations=1, max_completion_length=9, temperature=0.0)
    found = completed(packed, PROMPTS, greedy)
    for prompt in PROMPTS:
        wanted = greedy_completion(plain, prompt.tokens, 9, sorted(STOP))
        assert found[prompt.number].tokens == [wanted]


def test_tokens_are_drawn_by_their_probabilities():
    probabilities = torch.tensor([[0.0, 0.2, 0.5, 0.3, 0.0]], dtype=torch.float64)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampled = inverse_cdf(probabilities.expand(1000, 5).contiguous(), uniforms)
    assert torch.bincount(sampled, minlength=5).tolist() == [0, 200, 500, 300, 0]
    # Rounding may leave the sum short of a number that is almost 1.
    assert inverse_cdf(probabilities, torch.tensor([1.0], dtype=torch.float64)).tolist() == [3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [1, 2, 3, 4]),
        (2, 1.0, 0.0, [2, 3]),
        (0, 0.75, 0.0, [2, 3]),
        (3, 0.6, 0.0, [2, 3]),
        (0, 1.0, 0.2, [1, 2, 3]),
    ],
)
def test_unlikely_tokens_are_left_out(top_k, top_p, min_p, kept):
    logps = torch.tensor([[0.0, 0.15, 0.5, 0.3, 0.05]], dtype=torch.float64).log()
    found = token_warpers(RolloutSamplingParams(1, 1, top_k=top_k, top_p=top_p, min_p=min_p))(None, logps).exp()
    assert torch.nonzero(found[0])[:, 0].tolist() == kept


OTHERS = ("lfm2", "dory", "git", "moshi", "recurrent_gemma", "xlstm")


@pytest.mark.parametrize("family", ["mamba", "rwkv", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_a_model_that_does_not_decode_batches_decodes_one_prompt_as_without_a_cache(monkeypatch, family):
    monkeypatch.setattr("odc_mpi.rollout.decode._MIN_ROWS", 4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # for outputs that depend on all tokens
            parameter.copy_(3 * parameter if parameter.ndim >= 2 else parameter + 0.1 * torch.randn_like(parameter))
    model.generation_config.use_cache = False
    assert not decodes_batches(model)
    for prompt in PROMPTS:
        found = completed(model, [prompt], RolloutSamplingParams(4, 12, temperature=0.0))
        wanted = greedy_completion(model, prompt.tokens, 12, list(STOP))
        assert found[prompt.number].tokens == [wanted] * 4
