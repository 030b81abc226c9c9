"""No objective makes the host wait for the GPU before the backward pass; skipped, unless ODC_MPI_REQUIRE_GPU=1."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed_models import packed_model
from pair_files import rollout_group, write_pairs
from tiny_qwen2 import SIZES
from transformers import AutoModelForSequenceClassification, masking_utils

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.groups import pack_groups, read_groups
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.training.preferences.answer_logps import AnswerLogps
from odc_mpi.training.preferences.pairs import PairObjective
from odc_mpi.training.recipes.dpo import DPOConfig
from odc_mpi.training.recipes.dpo.scorer import PreferenceScorer
from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.reward import RewardConfig
from odc_mpi.training.recipes.reward.scorer import RewardScorer
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.recipes.sft.objective import SFTObjective

pytestmark = pytest.mark.usefixtures("gpu")


def objective_for(name, module):
    if name == "sft":
        return SFTObjective(module)
    if name == "dpo":
        scorer = PreferenceScorer(
            AnswerLogps(TokenLogps(module), True), DPOConfig(), torch.zeros(2, 2, dtype=torch.float64)
        )
        return PairObjective(scorer)
    if name == "reward":
        return PairObjective(RewardScorer(module, True, RewardConfig()))
    rl = RLConfig(loss_type="grpo", beta=0.1)
    if name == "stale":
        rl = replace(rl, max_staleness=1, importance_sampling_mode="geometric_mask")
    return GRPOObjective(module, rl, 1, lambda *arguments: SimpleNamespace(logps=torch.zeros(9, device="cuda")))


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo", "stale"])
def test_the_host_does_not_wait_for_a_loss(tmp_path, monkeypatch, name):
    # It waits once per forward, to find out whether there are several sequences.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    kind = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1} if name == "reward" else {}
    heads = {"hidden_size": 8 * SIZES["num_attention_heads"], "attention_dropout": 0.0}
    module = packed_model(**kind, **heads, pad_token_id=0).to("cuda", torch.bfloat16)
    objective, model = objective_for(name, module), SimpleNamespace(device=torch.device("cuda"))
    write_pairs(tmp_path / "pairs.h5", [(5, 4, 7), (3, 9, 1)], vocab_size=61)
    with Dataset(tmp_path / "pairs.h5") as dataset:
        minibatch = SimpleNamespace(dataset=dataset, indices=np.arange(2), num_tokens=21)
        objective.on_step_begin(SimpleNamespace(minibatch=minibatch))
        rollouts = pack_groups([rollout_group([4, 5, 6], [[1, 2, 3, 4], [5, 6, 7, 8, 9]], advantages=[1.0, -1.0])])
        microbatch = rollouts if name in ("grpo", "stale") else read_groups(dataset, minibatch.indices)
        for mode in ("default", "error"):  # the first call compiles kernels and takes memory
            torch.cuda.set_sync_debug_mode(mode)
            try:
                loss = objective.loss(minibatch, microbatch.to(model.device))
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    values = objective.statistics.tolist()
    objective.on_microbatch_end(SimpleNamespace(microbatch=microbatch, loss=loss.item(), statistics=values))
    assert all(np.isfinite(objective.local_values()))
