"""The gradient of distillation, in expectation over the next token, is that of TRL's reverse KL divergence."""

import numpy as np
import pytest
import torch
from packed_models import packed_model

from odc_mpi.data.groups import pack_groups
from odc_mpi.data.prompt_group import Answer, PromptGroup
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.training.recipes.distill.objective import DistillObjective
from odc_mpi.training.recipes.rollouts.settings import RLConfig

VOCABULARY = 13
PROMPT = [3, 1, 4, 1, 5]


def one_token(token):
    """A microbatch in which the token follows the prompt."""
    columns = {"logps": np.zeros(1, np.float32), "advantage": np.float64(0)}
    return pack_groups([PromptGroup(0, np.array(PROMPT), [Answer(np.array([token]), np.ones(1, np.bool_), columns)])])


def test_in_expectation_it_is_the_reverse_divergence_of_trl():
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    policy = packed_model(vocab_size=VOCABULARY).double().eval()
    teacher = packed_model(vocab_size=VOCABULARY, num_hidden_layers=1, initializer_range=0.3).double().eval()

    @torch.no_grad()
    def teacher_scores(*arguments):
        return TokenLogps(teacher)(*arguments)

    objective, total = DistillObjective(policy, RLConfig(temperature=0.7), 1, teacher_scores), 0.0
    microbatches = [one_token(token) for token in range(VOCABULARY)]
    for microbatch in microbatches:
        inputs = microbatch.inputs, microbatch.logit_positions, microbatch.targets, 0.7
        probability = TokenLogps(policy)(*inputs).logps.detach().exp()
        loss = probability * objective.loss(None, microbatch)
        loss.backward()
        total += loss.item()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    hidden = [model.model(**microbatches[0].inputs).last_hidden_state[:, 4:5] for model in (policy, teacher)]
    heads = [model.get_output_embeddings().weight for model in (policy, teacher)]
    mask = torch.ones(1, 1)
    wanted, _, _ = trl._chunked_divergence_loss(hidden[0], hidden[1].detach(), heads[0], heads[1].detach(), mask, 1.0,
                                                temperature=0.7)  # fmt: skip
    wanted.backward()
    assert total == pytest.approx(wanted.item(), rel=1e-6) and total > 0.01
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-6, msg=name)
    assert max(gradient.abs().max() for gradient in found.values()) > 1e-3
