"""Losses of pairs are those of the `DPOTrainer` of TRL on the same tokens."""

from types import SimpleNamespace
from typing import get_args

import like_trl
import numpy as np
import pytest
import torch

from odc_mpi.data.dataset.format import COLUMNS
from odc_mpi.data.groups import read_groups
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.training.preferences.answer_logps import AnswerLogps, AnswerScores
from odc_mpi.training.preferences.pairs import PairObjective
from odc_mpi.training.recipes.dpo import DPOConfig, LossType
from odc_mpi.training.recipes.dpo.scorer import PreferenceScorer, pair_loss, pair_statistics

pytestmark = like_trl.WARNINGS

#: Records of preferences, with answers of different lengths.
RECORDS = [
    {"prompt": "the sky is ", "chosen": "blue and wide", "rejected": "green"},
    {"prompt": "two and two are ", "chosen": "four", "rejected": "five, or six, or seven"},
    {"prompt": "a b c ", "chosen": "d e f g", "rejected": "a b c"},
]


def test_label_smoothing_and_weights():
    """In TRL, smoothing has no effect on `sigmoid`. Here it is the probability that the answers are swapped."""
    torch.manual_seed(0)
    policy, ratios = (torch.randn(5, 2, dtype=torch.float64) * 9 for _ in range(2))
    scores = AnswerScores(policy, torch.randint(1, 9, (5, 2)), torch.zeros(()), None)
    right, swapped = (pair_loss(DPOConfig(0.3), each, scores, 3.0) for each in (ratios, ratios.flip(1)))
    found = pair_loss(DPOConfig(0.3, ["sigmoid", "sft"], [2.0, 0.5], 0.2), ratios, scores, 3.0)
    torch.testing.assert_close(found, 2 * (0.8 * right + 0.2 * swapped) - 0.5 * policy[:, 0] / 3, rtol=1e-12, atol=0)


def test_statistics_have_the_names_of_trl():
    policy, reference = [[-3.0, -5.0], [-9.0, -4.0], [-1.0, -2.0]], [[-4.0, -4.0], [-8.0, -4.0], [-1.0, -2.0]]
    policy, reference = (torch.tensor(logps).double() for logps in (policy, reference))
    assert pair_statistics(DPOConfig(0.5), policy - reference, policy).tolist() == [
        [0.5, -0.5, 1, 1, -3, -5],
        [-0.5, 0, 0, -0.5, -9, -4],
        [0, 0, 0.5, 0, -1, -2],
    ]


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """A trainer of TRL for a tiny model, and the data set of the same tokens."""
    folder = tmp_path_factory.mktemp("dpo")
    trainer, rows = like_trl.make_trainer("DPO", folder, RECORDS), []
    for row in trainer.train_dataset:
        prompt, chosen, rejected = (row[f"{name}_ids"] for name in ("prompt", "chosen", "rejected"))
        counts = dict(zip(COLUMNS["pairs"], (len(prompt), len(chosen), len(chosen)), strict=True))
        rows.append((prompt, [*chosen, *rejected], counts))
    with like_trl.write_rows(folder / "pairs.h5", rows) as dataset:
        yield trainer, dataset


@pytest.mark.parametrize(
    ("types", "weights", "smoothing"),
    [
        *(([name], None, 0.0) for name in get_args(LossType)),
        (["robust"], None, 0.2),
        (["sigmoid", "sft"], [0.8, 0.3], 0.0),
    ],
    ids=str,
)
def test_loss_metrics_and_gradients_are_those_of_trl(trl_trainer, types, weights, smoothing):
    trainer, dataset = trl_trainer
    trainer.loss_types, trainer.loss_weights = types, weights or [1.0] * len(types)
    trainer.label_smoothing = smoothing
    wanted, ours, indices = like_trl.loss_of(trainer), like_trl.our_model(trainer), np.arange(3)
    compute = AnswerLogps(TokenLogps(ours), packs=True)
    with torch.no_grad():
        reference = AnswerLogps(TokenLogps(trainer.ref_model), packs=False)
        values = torch.cat([reference(read_groups(dataset, np.array([i]))).logps for i in range(3)])
    dpo = DPOConfig(0.1, types, weights, smoothing)
    objective = PairObjective(PreferenceScorer(compute, dpo, values))
    minibatch = SimpleNamespace(dataset=dataset, indices=indices, num_tokens=int(dataset.num_trained_tokens.sum()))
    loss = objective.loss(minibatch, read_groups(dataset, indices))
    loss.backward()
    like_trl.assert_like_trl(loss, ours, wanted, trainer)
    found = zip(objective.gathered_names[1:], objective.statistics.tolist(), strict=True)
    like_trl.assert_metrics(dict(found), trainer)
