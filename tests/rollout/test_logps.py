"""Log-probabilities in chunks of the head are those of all logits at once, and so are their gradients."""

import numpy as np
import pytest
import torch
from packed_models import packed_model, plain_model

from odc_mpi.models.decoding import Prompt
from odc_mpi.rollout import logps
from odc_mpi.rollout.groups import PromptGroup, pack_microbatches
from odc_mpi.rollout.logps import TokenLogps, token_logps
from odc_mpi.rollout.sample import RolloutSamplingParams, sample


def naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("with_bias", [True, False])
def test_they_are_the_formula(monkeypatch, with_bias):
    monkeypatch.setattr(logps, "MAX_ELEMENTS", 13 * 3)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 4, requires_grad=True), torch.randn(13, 4, requires_grad=True)
    bias = torch.randn(13, requires_grad=True) if with_bias else None
    targets, upstream = torch.randint(13, (10,)), torch.randn(10)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    wanted = naive(hidden, weight, bias, targets, 0.7)
    found = TokenLogps.apply(hidden, weight, bias, targets, 0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(found, inputs, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs, upstream), rtol=1e-5, atol=1e-5)


def test_a_model_gives_them_with_its_head_and_without():
    model = packed_model().eval()
    inputs = {
        "input_ids": torch.randint(61, (1, 9)),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
        "cu_seq_lens_q": torch.tensor([0, 5, 9], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 5, 9], dtype=torch.int32),
        "max_length_q": 5,
        "max_length_k": 5,
        "use_cache": False,
    }
    places, targets = torch.tensor([2, 3, 6]), torch.tensor([4, 60, 0])
    logits = model(**inputs).logits[0, places] / 0.5
    wanted = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    found = token_logps(model, inputs, places, targets, 0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    model.config.logit_scale = 1.0  # as of models that scale logits behind the head
    torch.testing.assert_close(token_logps(model, inputs, places, targets, 0.5), wanted, rtol=1e-5, atol=1e-6)
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_those_of_training_are_those_of_sampling_and_of_the_formula(temperature, sharpness):
    """To 1e-6, of the log-probability where that is beyond 1: float32 holds seven digits of it."""
    model, exact = packed_model().eval(), plain_model().double()
    for each in (model, exact):
        for parameter in each.parameters():
            parameter.data *= sharpness if parameter.ndim > 1 else 1.0
    tokens, made = [[5, 7, 9], list(range(1, 12)), [60]], {}
    asked = [Prompt(i, own, (3,)) for i, own in enumerate(tokens)]
    sample(model, asked, RolloutSamplingParams(8, 20, temperature, seed=1), made.__setitem__)
    ones, none = np.ones(8), np.zeros(8, dtype=np.bool_)
    groups = [PromptGroup(i, i, own, made[i].tokens, made[i].logps, ones, none) for i, own in enumerate(tokens)]
    (batch,) = pack_microbatches(groups, 10_000, with_all=True)
    found = token_logps(model, batch.inputs, batch.logit_positions, batch.targets, temperature).detach()
    wanted = []
    for group in groups:
        for own in group.completions:
            ids = torch.tensor([[*group.prompt, *own]])
            logits = exact(input_ids=ids, use_cache=False).logits[0, len(group.prompt) - 1 : -1].double() / temperature
            wanted.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(own)[:, None])[:, 0].detach())
    bound = 1e-6 * torch.cat(wanted).abs().clamp(min=1.0)
    assert ((found - batch.logps).abs() <= bound).all()
    assert ((found - torch.cat(wanted)).abs() <= bound).all()
    assert ((batch.logps - torch.cat(wanted)).abs() <= bound).all()
