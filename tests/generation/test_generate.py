"""Completions are those of transformers' own `generate`, and nothing of a model in training is left changed."""

import numpy as np
import pytest
import torch
from packed_models import greedy_completion, packed_model, plain_model
from user_errors import refused

from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.errors import UserError
from odc_mpi.generation.generate import SamplingParams, generate
from odc_mpi.models import attention
from odc_mpi.models.decoding import Prompt

PROMPTS = [Prompt(0, (5, 7, 9), ()), Prompt(1, tuple(range(1, 30)), ()), Prompt(2, (60,), ())]
GREEDY = SamplingParams(max_new_tokens=9)
SAMPLED = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.8, seed=3)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}])
def test_it_is_transformers_own(changes):
    plain, packed = plain_model(**changes), packed_model(**changes)
    wanted = [greedy_completion(plain, prompt.tokens, 9) for prompt in PROMPTS]
    # In any order: a completion depends on its prompt alone.
    found = {prompt.number: generate(packed, prompt, GREEDY) for prompt in reversed(PROMPTS)}
    assert [found[prompt.number].tokens for prompt in PROMPTS] == wanted
    assert {one.finish_reason for one in found.values()} == {"length"}


def test_a_seed_is_of_a_prompt():
    packed, prompt = packed_model(), PROMPTS[0]
    again = [generate(packed, Prompt(index, prompt.tokens, ()), SAMPLED).tokens for index in (0, 0, 1)]
    assert again[0] == again[1] != again[2]


def test_all_is_as_before():
    model = packed_model()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(4)
    inputs = packed_inputs(np.arange(6), [3, 3])
    state, before = torch.get_rng_state(), model(**inputs)
    torch.set_rng_state(state)
    defaults = model.generation_config.to_dict()
    generate(model, PROMPTS[0], SAMPLED)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention.IMPLEMENTATIONS["sdpa"] and model.config.use_cache is False
    assert model.generation_config.to_dict() == defaults
    after = model(**inputs)  # dropout included
    assert torch.equal(after.logits, before.logits) and after.past_key_values is None
    with pytest.raises(UserError):
        generate(model, Prompt(0, (), ()), GREEDY)
    assert model.config._attn_implementation == attention.IMPLEMENTATIONS["sdpa"]


def test_a_stop_token_ends_it():
    model = packed_model()
    whole = generate(model, PROMPTS[0], GREEDY).tokens
    position = max(range(len(whole)), key=lambda i: (whole[i] not in whole[:i], i))  # first time, as late as possible
    ended = generate(model, PROMPTS[0]._replace(stop=(whole[position], 60)), GREEDY)
    assert (ended.tokens, ended.finish_reason) == (whole[: position + 1], "stop")


def test_a_completion_fills_the_positions_and_no_more():
    found = generate(packed_model(), Prompt(0, tuple(range(37)), ()), GREEDY)
    assert (len(found.tokens), found.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((), "expected at least one token, got none"),
        (tuple(range(40)), "max_position_embeddings, 40, got 40: shorten it"),
        ((61,), "expected tokens below the model's vocab_size, 61, got 61"),
    ],
)
def test_prompts_that_do_not_fit(tokens, words):
    refused(words, generate, packed_model(), Prompt(7, tokens, ()), GREEDY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more"),
        ({"temperature": -0.1}, "temperature: expected a finite number, 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p: expected above 0"),
        ({"seed": -1}, "seed: expected 0 or more"),
    ],
)
def test_settings_out_of_range(settings, words):
    refused(words, SamplingParams, **settings)
