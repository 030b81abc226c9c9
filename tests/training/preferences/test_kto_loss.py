"""Losses of answers with labels are those of the `KTOTrainer` of TRL on the same tokens."""

import copy
from types import SimpleNamespace

import like_trl
import numpy as np
import pytest
import torch

from odc_mpi.data.groups import read_groups
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.evaluation import ForwardPass
from odc_mpi.training.preferences.answer_logps import AnswerLogps
from odc_mpi.training.recipes.kto import KTOConfig
from odc_mpi.training.recipes.kto import kl as kl_module
from odc_mpi.training.recipes.kto.objective import KTOObjective, KTOScorer

pytestmark = like_trl.WARNINGS

RECORDS = [
    {"prompt": "the sky is ", "completion": "blue and wide", "label": True},
    {"prompt": "the sky is ", "completion": "green", "label": False},
    {"prompt": "two and two are ", "completion": "five, or six, or seven", "label": False},
    {"prompt": "what follows all of the letters a b c d is ", "completion": "e", "label": True},
    {"prompt": "the end ", "completion": "of all", "label": True},
]


@pytest.fixture(scope="module", params=["kto", "apo_zero_unpaired"])
def trl_trainer(tmp_path_factory, request):
    """A trainer of TRL for a tiny model whose minibatch is one batch, and the data set of the same tokens."""
    folder = tmp_path_factory.mktemp("kto")
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7, "train_sampling_strategy": "sequential"}
    trainer = like_trl.make_trainer("KTO", folder, RECORDS, loss_type=request.param, **weights)
    rows = [
        (prompt := row["prompt_ids"], row["completion_ids"], {"num_prompt_tokens": len(prompt), "label": row["label"]})
        for row in trainer.train_dataset
    ]
    with like_trl.write_rows(folder / "labels.h5", rows) as dataset:
        yield trainer, dataset


class OneRank:
    """What the estimate needs of a run and its model, on one rank that claims all microbatches."""

    def __init__(self, dataset):
        self.device, self.rank, self.size, self.prefix = torch.device("cpu"), 0, 1, None
        self.world = self.model = self
        longest = int(dataset.lengths.max())
        data = SimpleNamespace(max_tokens_per_microbatch=2 * longest, cost="linear")
        self.config = SimpleNamespace(data=data, run=SimpleNamespace(exact=False))
        packing, module = SimpleNamespace(packs=True), SimpleNamespace(config=SimpleNamespace())
        self.inputs = SimpleNamespace(model=SimpleNamespace(packing=packing, flops=CostModel(), module=module))

    def activity(self, what):
        return torch.no_grad()

    def gather_values(self, values):
        return np.array([values])

    def draw(self, count):
        return range(count)

    def reset(self):
        pass


def test_loss_metrics_and_gradients_are_those_of_trl(trl_trainer, monkeypatch):
    trainer, dataset = trl_trainer
    wanted, ours = like_trl.loss_of(trainer), like_trl.our_model(trainer)
    kto = KTOConfig(0.1, trainer.loss_type, 1.3, 0.7)

    one_rank = OneRank(dataset)
    monkeypatch.setattr(kl_module, "Tickets", lambda world: world)
    policy = AnswerLogps(TokenLogps(ours), packs=True)
    frozen = AnswerLogps(TokenLogps(copy_packed(trainer.ref_model, ours)), packs=True)
    scorer = KTOScorer(policy, frozen)
    estimator = kl_module.KLEstimator(one_rank, scorer) if kto.loss_type == "kto" else None
    objective = KTOObjective(kto, scorer, estimator)
    indices = np.arange(len(RECORDS))
    minibatch = SimpleNamespace(dataset=dataset, indices=indices, num_tokens=int(dataset.num_trained_tokens.sum()))
    step = SimpleNamespace(minibatch=minibatch, metrics={})
    objective.on_step_begin(step)
    loss = objective.loss(minibatch, read_groups(dataset, indices))
    loss.backward()
    like_trl.assert_like_trl(loss, ours, wanted, trainer)
    objective.on_microbatch_end(SimpleNamespace(loss=loss.item(), statistics=objective.statistics.tolist()))
    gathered = MinibatchStats(objective.gathered_names)
    gathered.local.update(zip(objective.gathered_names, objective.local_values(), strict=True))
    gathered.receive_reports(np.stack([gathered.report(np.zeros(0), [True])]))
    objective.on_gathered(step, gathered)
    names = ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "entropy"]
    names += ["kl"] if estimator else []
    like_trl.assert_metrics({name: step.metrics[name] for name in names}, trainer, 5e-6)
    if estimator:
        assert step.metrics["kl"] > 0, "otherwise the estimate has no effect here"


def copy_packed(reference, model):
    """The reference model of TRL with the attention of the packed model."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(reference.state_dict())
    return copied


def test_a_mismatched_answer_is_truncated_and_a_single_prompt_gets_that_of_another(trl_trainer):
    _, dataset = trl_trainer
    lengths, prompts = dataset.lengths, dataset.columns["num_prompt_tokens"]
    order = np.array([2, 3, 0])
    longest = int(lengths.max())
    groups = kl_module._Mismatched(SimpleNamespace(dataset=dataset, indices=order), longest)
    assert prompts[3] + (lengths - prompts)[2] > longest, "otherwise no answer is truncated"
    for position, (prompt, answer) in enumerate([(2, 0), (3, 2), (0, 3)]):
        group = groups.read(position)
        wanted = np.concatenate([dataset[prompt][0][: prompts[prompt]], dataset[answer][0][prompts[answer] :]])
        [found] = group.answers
        kept = wanted[:longest]
        assert np.concatenate([group.prompt, found.tokens]).tolist() == kept.tolist()
        assert groups.lengths[position] == len(kept) and len(found.loss_mask) == len(found.tokens)
    [alone] = kl_module._Mismatched(SimpleNamespace(dataset=dataset, indices=np.array([4])), longest).read(0).answers
    assert alone.tokens.tolist() == dataset[0][0][prompts[0] :].tolist()


def test_values_of_held_out_answers_are_in_the_order_of_the_answers():
    microbatches = [SimpleNamespace(indices=np.array(indices)) for indices in ([3, 1], [0], [2])]
    forward_pass = SimpleNamespace(run=lambda minibatch, score: [score(each) for each in microbatches])
    columns = ForwardPass.columns(forward_pass, None, lambda each: torch.from_numpy(np.outer(each.indices, [10, -1])))
    assert columns == [(0, 10, 20, 30), (0, -1, -2, -3)]
