"""The parts of GRPO's loss, by their formulas."""

import pytest
import torch

from odc_mpi.training.objectives.grpo import kl_k3, loss_normalizer, policy_loss
from odc_mpi.training.rl.settings import GRPOConfig


def test_the_policy_loss_is_minus_the_advantage_and_so_is_its_gradient():
    logps, advantages = torch.tensor([-3.0, -0.1, -20.0], requires_grad=True), torch.tensor([1.5, -0.5, 0.0])
    found = policy_loss(logps, advantages)
    found.sum().backward()
    assert found.tolist() == logps.grad.tolist() == [-1.5, 0.5, 0.0]


@pytest.mark.parametrize("apart", [0.0, 1e-4, -1e-3, 0.3, -2.0, 5.0])
def test_the_divergence_is_the_formula_also_where_policies_are_alike(apart):
    reference = torch.tensor([-2.5])
    logps = reference - apart
    difference = (reference - logps).double()
    assert kl_k3(logps, reference).item() == pytest.approx((difference.exp() - difference - 1).item(), rel=1e-3)


def test_divisors():
    sections = [GRPOConfig(loss_type=name, max_completion_length=10) for name in ("dapo", "grpo", "dr_grpo")]
    assert [loss_normalizer(rl, num_tokens=30.0, num_completions=4.0) for rl in sections] == [30.0, 4.0, 40.0]
    assert loss_normalizer(sections[0], num_tokens=0.0, num_completions=4.0) == 1.0
