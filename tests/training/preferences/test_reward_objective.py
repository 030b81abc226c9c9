"""Rewards of answers that share their prompt are those of transformers, and their losses those of `RewardTrainer`."""

import copy
from types import SimpleNamespace

import like_trl
import numpy as np
import pytest
import torch
from packed_models import first_values, materialized, packed_model, plain_model
from pair_files import answer_rows, write_pairs
from tiny_configurations import tiny_config
from transformers import AutoModelForSequenceClassification

from odc_mpi.data.dataset.format import COLUMNS
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.groups import read_groups
from odc_mpi.data.tokenizer import END_OF_TEXT, train_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.models import build
from odc_mpi.models.configuration import full_configuration
from odc_mpi.models.heads import REWARD
from odc_mpi.training.preferences.pairs import PairObjective
from odc_mpi.training.recipes.reward import RewardConfig
from odc_mpi.training.recipes.reward.scorer import RewardScorer

pytestmark = like_trl.WARNINGS

#: Pairs in which an answer contains the other, or is empty, so that its reward can be at the end of the prompt.
RECORDS = [
    {"prompt": "the sky is ", "chosen": "blue and wide", "rejected": "green"},
    {"prompt": "two and two are ", "chosen": "four", "rejected": "four, or five"},
    {"prompt": "a b c ", "chosen": "d e f g", "rejected": ""},
]
COUNTS = [(3, 4, 2), (11, 5, 9), (1, 1, 1), (9, 1, 14)]


def num_common(first, second):
    return next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


@pytest.mark.parametrize("pads_with_end", [False, True], ids=["pad token", "end of text as pad token"])
@pytest.mark.parametrize("center", [None, 0.3])
def test_loss_metrics_and_gradients_are_those_of_reward_trainer(tmp_path, center, pads_with_end):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = train_tokenizer(iter([text for record in RECORDS for text in record.values()] * 20), 300)
    if pads_with_end:
        tokenizer.pad_token = END_OF_TEXT
    sizes = {"vocab_size": len(tokenizer), "attention_dropout": 0.0, "max_position_embeddings": 80, "num_labels": 1}
    theirs, ours = (model(AutoModelForSequenceClassification, **sizes) for model in (plain_model, packed_model))
    arguments = trl.RewardConfig(
        str(tmp_path), use_cpu=True, report_to="none", bf16=False, center_rewards_coefficient=center
    )
    trainer = trl.RewardTrainer(
        theirs, arguments, train_dataset=datasets.Dataset.from_list(RECORDS), processing_class=tokenizer
    )
    rows = [trainer.train_dataset[i] for i in range(3)]
    wanted = like_trl.loss_of(trainer)

    of_pairs = []
    for row in rows:
        chosen, rejected = row["chosen_ids"], row["rejected_ids"]
        prompt = num_common(chosen, rejected)
        counts = dict(zip(COLUMNS["pairs"], (prompt, *[len(chosen) - prompt] * 2), strict=True))
        of_pairs.append((chosen[:prompt], [*chosen[prompt:], *rejected[prompt:]], counts))
    ours.config.pad_token_id = tokenizer.pad_token_id
    objective = PairObjective(RewardScorer(ours.eval(), True, RewardConfig(center)))
    with like_trl.write_rows(tmp_path / "pairs.h5", of_pairs) as dataset:
        microbatch = read_groups(dataset, np.arange(3))
    loss = objective.loss(SimpleNamespace(indices=np.arange(3)), microbatch)
    loss.backward()
    like_trl.assert_like_trl(loss, ours, wanted, trainer, 1e-5, 1e-6)
    like_trl.assert_metrics(dict(zip(RewardScorer.statistics, objective.statistics.tolist(), strict=True)), trainer)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2", "mixtral", "bloom", "jamba"])
def test_rewards_of_all_families_are_those_of_transformers(tmp_path, kind):
    """Also if answers end with padding, or the answer is padding."""
    write_pairs(tmp_path / "pairs.h5", COUNTS, vocab_size=12)  # so that the padding token occurs
    settings = full_configuration(SimpleNamespace(config=tiny_config(kind)))
    meta_model = build.from_saved_config(settings, task=REWARD)
    values, model = first_values(meta_model), materialized(meta_model).eval()
    model.config.pad_token_id = 5
    # The implementation of the attention is stored in the configuration.
    config = copy.deepcopy(model.config)
    plain = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict(values, strict=False)
    packs = meta_model.packing.packs
    assert packs is (kind not in ("bloom", "jamba"))
    compute = RewardScorer(model, packs, RewardConfig()).rewards
    with Dataset(tmp_path / "pairs.h5") as dataset, torch.no_grad():
        microbatches = [[0, 2, 3, 1]] if packs else [[0], [2], [3], [1]]
        found = torch.cat([compute(read_groups(dataset, np.array(indices))) for indices in microbatches])
        wanted = [plain(input_ids=row[None]).logits[0, 0] for row in answer_rows(dataset, (0, 2, 3, 1))]
    torch.testing.assert_close(found.flatten(), torch.stack(wanted).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("mamba2", "a sequence classifier of transformers, which has none for mamba2"),
        ("bert", "requires a causal model with a linear layer score"),
    ],
)
def test_families_without_such_a_classifier_are_refused(kind, problem):
    with pytest.raises(UserError, match=problem):
        build.from_config({"model_type": kind}, seed=0, task=REWARD)
