"""Log-probabilities in chunks of the head are those of all logits at once, and so are their gradients."""

import pytest
import torch
from test_generate import packed_model

from odc_mpi.rollout import logps
from odc_mpi.rollout.logps import TokenLogps, token_logps


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
