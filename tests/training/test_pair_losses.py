"""Losses of pairs are those of formulas in float64, and of the `DPOTrainer` of TRL on the same tokens."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed_models import packed_model, plain_model

from odc_mpi.data.dataset.format import PairCounts
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.pairs.microbatch import read_pairs
from odc_mpi.data.tokenizer import train_tokenizer
from odc_mpi.training.objectives.dpo import (
    AnswerLogps,
    AnswerScores,
    DPOObjective,
    PreferenceScorer,
    pair_loss,
    pair_statistics,
)
from odc_mpi.training.pairs.settings import DPOConfig

# Of the libraries of TRL.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]

#: Records of preferences, with answers of different lengths.
RECORDS = [
    {"prompt": "the sky is ", "chosen": "blue and wide", "rejected": "green"},
    {"prompt": "two and two are ", "chosen": "four", "rejected": "five, or six, or seven"},
    {"prompt": "a b c ", "chosen": "d e f g", "rejected": "a b c"},
]


def s(x):
    return 1 / (1 + math.exp(-x))


#: Formulas in terms of the sums of log-ratios r, the means m, beta b and the smoothing e.
FORMULAS = {
    "sigmoid": lambda r, m, b, e, nll: -(1 - e) * math.log(s(b * (r[0] - r[1]))) - e * math.log(s(b * (r[1] - r[0]))),
    "robust": lambda r, m, b, e, nll: (
        (-(1 - e) * math.log(s(b * (r[0] - r[1]))) + e * math.log(s(b * (r[1] - r[0])))) / (1 - 2 * e)
    ),
    "hinge": lambda r, m, b, e, nll: max(0.0, 1 - b * (r[0] - r[1])),
    "ipo": lambda r, m, b, e, nll: (m[0] - m[1] - 0.5 / b) ** 2,
    "sigmoid_norm": lambda r, m, b, e, nll: -math.log(s(b * (m[0] - m[1]))),
    "apo_zero": lambda r, m, b, e, nll: 1 - s(b * r[0]) + s(b * r[1]),
    "apo_down": lambda r, m, b, e, nll: s(b * r[0]) + 1 - s(b * (r[0] - r[1])),
    "sft": lambda r, m, b, e, nll: nll,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_their_gradients_are_the_formulas(name, smoothing):
    torch.manual_seed(0)
    policy, reference = (torch.randn(5, 2, dtype=torch.float64) * 9 for _ in range(2))
    policy.requires_grad_()
    lengths = torch.randint(1, 9, (5, 2))
    mean_length = lengths[:, 0].double().mean().item()
    pairs = (policy - reference, AnswerScores(policy, lengths, torch.zeros(()), None), mean_length)
    found = pair_loss(DPOConfig(0.3, name, label_smoothing=smoothing), *pairs)
    (gradient,) = torch.autograd.grad(found.sum(), policy, retain_graph=True)
    for i in range(5):

        def wanted(*answers, i=i):
            r = [answer - other for answer, other in zip(answers, reference[i].tolist(), strict=True)]
            m = [ratio / length for ratio, length in zip(r, lengths[i].tolist(), strict=True)]
            return FORMULAS[name](r, m, 0.3, smoothing, -answers[0] / mean_length)

        chosen, rejected = policy[i].tolist()
        assert found[i].item() == pytest.approx(wanted(chosen, rejected), rel=1e-12)
        slopes = [
            (wanted(chosen + h, rejected + k) - wanted(chosen - h, rejected - k)) / 2e-4
            for h, k in ((1e-4, 0), (0, 1e-4))
        ]
        assert gradient[i].tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    both = pair_loss(DPOConfig(0.3, [name, "sft"], [2.0, 0.5], label_smoothing=smoothing), *pairs)
    torch.testing.assert_close(both, 2 * found - 0.5 * policy[:, 0] / mean_length, rtol=1e-12, atol=0)


def test_statistics_have_the_names_of_trl():
    policy, reference = [[-3.0, -5.0], [-9.0, -4.0], [-1.0, -2.0]], [[-4.0, -4.0], [-8.0, -4.0], [-1.0, -2.0]]
    policy, reference = (torch.tensor(logps).double() for logps in (policy, reference))
    assert pair_statistics(DPOConfig(0.5), policy - reference, policy).tolist() == [
        [0.5, -0.5, 1, -3, -5],
        [-0.5, 0, 0, -9, -4],
        [0, 0, 0.5, -1, -2],
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
        yield trainer, minibatch, read_pairs(dataset, indices), len(tokenizer)


def model_copy(model):
    """A reference model that differs from the policy, so that no term of a loss is zero."""
    other = plain_model(vocab_size=model.config.vocab_size, attention_dropout=0.0, max_position_embeddings=80)
    torch.manual_seed(5)
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return other


@pytest.mark.parametrize(
    ("types", "weights", "smoothing"),
    [*(([name], None, 0.0) for name in FORMULAS), (["robust"], None, 0.2), (["sigmoid", "sft"], [0.8, 0.3], 0.0)],
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
    compute = AnswerLogps(ours, packs=True)
    with torch.no_grad():
        reference = AnswerLogps(trainer.ref_model, packs=False)
        values = torch.cat([reference(read_pairs(minibatch.dataset, np.array([i]))).logps for i in range(3)])
    dpo = DPOConfig(0.1, types, weights, smoothing)
    objective = DPOObjective(PreferenceScorer(compute, dpo, values))
    loss = objective.loss(None, minibatch, microbatch)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        bound = 1e-6 * float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    found = dict(zip(objective.gathered_names[1:], objective.statistics.tolist(), strict=True))
    for name, value in found.items():
        assert value == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5, abs=1e-6), name
