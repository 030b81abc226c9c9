"""Losses of pairs are those of the `DPOTrainer` of TRL on the same tokens."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from packed_models import packed_model, plain_model

from odc_mpi.data.dataset.format import PairCounts
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.groups import read_groups
from odc_mpi.data.tokenizer import train_tokenizer
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.training.preferences.answer_logps import AnswerLogps, AnswerScores
from odc_mpi.training.preferences.pairs import PairObjective
from odc_mpi.training.recipes.dpo import DPOConfig, LossType
from odc_mpi.training.recipes.dpo.scorer import PreferenceScorer, pair_loss, pair_statistics

# Of the libraries of TRL.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]

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
    """A trainer of TRL for a tiny model, and the microbatch of the same tokens."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("dpo")
    texts = [text for record in RECORDS for text in record.values()]
    tokenizer = train_tokenizer(iter(texts * 20), 300)
    arguments = trl.DPOConfig(str(folder), per_device_train_batch_size=3, use_cpu=True, report_to="none", bf16=False)
    model = plain_model(vocab_size=len(tokenizer), attention_dropout=0.0, max_position_embeddings=80)
    trainer = trl.DPOTrainer(
        model,
        model_copy(model),
        arguments,
        train_dataset=datasets.Dataset.from_list(RECORDS),
        processing_class=tokenizer,
    )
    with DatasetWriter(folder / "pairs.h5", vocab_size=len(tokenizer), tokenizer="t", source="s") as writer:
        for row in trainer.train_dataset:
            prompt, chosen, rejected = (row[f"{name}_ids"] for name in ("prompt", "chosen", "rejected"))
            tokens = np.array([*prompt, *chosen, *rejected])
            writer.append(
                tokens, np.arange(len(tokens)) >= len(prompt), PairCounts(len(prompt), len(chosen), len(chosen))
            )
    with Dataset(folder / "pairs.h5") as dataset:
        indices = np.arange(3)
        minibatch = SimpleNamespace(dataset=dataset, indices=indices, num_tokens=int(dataset.num_trained_tokens.sum()))
        yield trainer, minibatch, read_groups(dataset, indices), len(tokenizer)


def model_copy(model):
    """A reference model that differs from the policy, so that no term of a loss is zero."""
    other = plain_model(vocab_size=model.config.vocab_size, attention_dropout=0.0, max_position_embeddings=80)
    torch.manual_seed(5)
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return other


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
    trainer, minibatch, microbatch, vocab_size = trl_trainer
    trainer.loss_types, trainer.loss_weights = types, weights or [1.0] * len(types)
    trainer.label_smoothing = smoothing
    trainer._metrics["train"].clear()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    theirs = trainer.model.train().double()
    trainer.ref_model.double()
    theirs.zero_grad()
    wanted = trainer.compute_loss(theirs, batch)
    wanted.backward()

    ours = packed_model(vocab_size=vocab_size, attention_dropout=0.0, max_position_embeddings=80).eval().double()
    compute = AnswerLogps(TokenLogps(ours), packs=True)
    with torch.no_grad():
        reference = AnswerLogps(TokenLogps(trainer.ref_model), packs=False)
        values = torch.cat([reference(read_groups(minibatch.dataset, np.array([i]))).logps for i in range(3)])
    dpo = DPOConfig(0.1, types, weights, smoothing)
    objective = PairObjective(PreferenceScorer(compute, dpo, values))
    loss = objective.loss(minibatch, microbatch)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        bound = 1e-6 * float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    found = dict(zip(objective.gathered_names[1:], objective.statistics.tolist(), strict=True))
    for name, value in found.items():
        assert value == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5, abs=1e-6), name
