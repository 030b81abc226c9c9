"""KTO on all ranks is that of a plain loop, which computes each answer, and each mismatched one, as a sequence."""

import copy
import time

import numpy as np
import pytest
import torch
import torch_reference
from exact_runs import ExactRuns
from small_training import assert_saved, configure, first_minibatches, on_first_rank, train_to_the_end

from odc_mpi.comm.group import Group
from odc_mpi.data.dataset.format import LabelColumns
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models import families
from odc_mpi.training.recipes.kto.objective import KTOObjective, KTOScorer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

BETA, WEIGHTS = 0.5, (1.3, 0.7)


def settings(labels_path, base, **changes):
    return configure(
        labels_path,
        **{
            "run.objective": "kto",
            "kto.beta": BETA,
            "kto.desirable_weight": WEIGHTS[0],
            "kto.undesirable_weight": WEIGHTS[1],
            "data.eval_path": labels_path.with_suffix(".eval.h5"),
            "run.eval_on_start": True,
            "run.dir": base,
            "optim.warmup_steps": 0,
            **changes,
        },
    )


def log_ratio(module, frozen, dataset, prompt, answer):
    """The log-ratio of the answer to one prompt if it follows another, and its log-probability."""
    num_prompts = dataset.columns["num_prompt_tokens"]
    parts = dataset[prompt][0][: num_prompts[prompt]], dataset[answer][0][num_prompts[answer] :]
    row, num_prompt = torch.cat([torch.from_numpy(part) for part in parts]), num_prompts[prompt]

    def logp(model):
        logps = model(input_ids=row[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        return logps.gather(1, row[1:, None])[num_prompt - 1 :].double().sum()

    with torch.no_grad():
        reference = logp(frozen)
    own = logp(module)
    return own - reference, own


def estimate(module, frozen, dataset, indices):
    with torch.no_grad():
        previous = [indices[-1], *indices[:-1]]
        ratios = [log_ratio(module, frozen, dataset, *pair)[0] for pair in zip(indices, previous, strict=True)]
    return max(0.0, float(torch.stack(ratios).mean()))


def compute_losses(module, frozen, dataset, indices, kl):
    losses = []
    for index in indices:
        ratio, _ = log_ratio(module, frozen, dataset, index, index)
        sign, weight = (1, WEIGHTS[0]) if dataset.columns["label"][index] else (-1, WEIGHTS[1])
        losses.append(weight * (1 - torch.sigmoid(BETA * sign * (ratio - kl))))
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("balance", "packs", "loss_type"),
    [
        pytest.param("lb_mini", True, "kto", marks=pytest.mark.sizes(3)),
        pytest.param("dynamic", True, "kto", marks=pytest.mark.sizes(1, 2)),
        pytest.param("dynamic", False, "kto", marks=pytest.mark.sizes(2)),
        pytest.param("dynamic", True, "apo_zero_unpaired", marks=pytest.mark.sizes(2)),
    ],
)
def test_losses_and_parameters_are_those_of_a_plain_loop(
    world, labels_path, base, monkeypatch, balance, packs, loss_type
):
    if not packs:
        monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")
    changes = {"data.balance": balance, "kto.loss_type": loss_type, "optim.learning_rate": 0.02}
    config = settings(labels_path, base, **changes)
    lines, summary = train_to_the_end(config, world)

    def compare():
        start, *steps = lines
        module, estimates = torch_reference.initial_model(config), []
        frozen = copy.deepcopy(module)

        def compute_loss(module, dataset, indices):
            kl = estimate(module, frozen, dataset, indices) if loss_type == "kto" else 0.0
            estimates.append(kl)
            return compute_losses(module, frozen, dataset, indices, kl).mean()

        with Dataset(labels_path) as dataset:
            minibatches = first_minibatches(config, dataset)
            losses = torch_reference.train(module, dataset, minibatches, config.optim, compute_loss)
        assert [line["loss"] for line in steps] == pytest.approx(losses, rel=2e-6)
        if loss_type == "kto":
            assert [line["kl"] for line in steps] == pytest.approx(estimates, rel=1e-4, abs=1e-6)
            assert max(estimates) > 1e-3, "otherwise the estimate has no effect here"
        assert_saved(base, module)
        with Dataset(labels_path.with_suffix(".eval.h5")) as held_out, torch.no_grad():
            kl = estimate(module, frozen, held_out, range(10)) if loss_type == "kto" else 0.0
            wanted = compute_losses(module, frozen, held_out, range(10), kl).mean().item()
            found = torch.tensor([log_ratio(module, frozen, held_out, i, i) for i in range(10)])
            wanted_labels = torch.from_numpy(held_out.columns["label"] == 1)
        assert steps[-1]["eval_loss"] == summary["eval_loss"] == pytest.approx(wanted, rel=1e-5)
        chosen, rejected = found[wanted_labels].mean(0), found[~wanted_labels].mean(0)
        for name, value in {
            "rewards/chosen": BETA * chosen[0],
            "rewards/rejected": BETA * rejected[0],
            "rewards/margins": BETA * (chosen - rejected)[0],
            "logps/chosen": chosen[1],
            "logps/rejected": rejected[1],
        }.items():
            assert steps[-1][f"eval_{name}"] == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name
        assert start["eval_rewards/chosen"] == 0, "the reference model is the model before the training"

    on_first_rank(world, compare)


@pytest.mark.parametrize(
    ("balance", "adapters"),
    [
        pytest.param("lb_mini", {}, id="full", marks=pytest.mark.sizes(2)),
        pytest.param("dynamic", {"lora__r": 4}, id="adapters", marks=pytest.mark.sizes(3)),
    ],
)
def test_exact_runs_have_the_bits_of_one_rank(world, labels_path, base, balance, adapters):
    exact = ExactRuns(world, base, lambda folder, changes: settings(labels_path, folder, **changes))
    changes = {"run__exact": True, "data__balance": balance, "run__steps": 3, **adapters}
    found = exact.train("all", world, **changes)
    assert found == exact.alone(**changes)
    assert len([name for name in found[1][-1] if name.startswith(("eval_", "rewards/", "logps/"))]) > 10


@pytest.mark.sizes(2)
def test_a_resumed_run_has_the_reference_model_of_the_first_start(world, labels_path, base):
    """The losses of the second half are those of a run that was not interrupted."""
    changes = {"run.checkpoint_every": 2, "optim.lr_scheduler_type": "constant"}
    whole, _ = train_to_the_end(settings(labels_path, base / "a", **changes, **{"run.steps": 4}), world)
    train_to_the_end(settings(labels_path, base / "b", **changes, **{"run.steps": 2}), world)
    resumed, _ = train_to_the_end(settings(labels_path, base / "b", **changes, **{"run.steps": 4}), world)
    losses = {line["step"]: line["loss"] for line in resumed if "loss" in line}
    assert [losses[step] for step in (3, 4)] == pytest.approx([line["loss"] for line in whole[-2:]], rel=1e-6)


@pytest.mark.sizes(2)
def test_the_estimate_is_the_only_wait_before_gradients_are_complete(world, labels_path, base, monkeypatch):
    """A slow rank makes others wait at K, not before; each step has one more collective."""
    arrivals, gather, score = [], Group.gather_values, KTOScorer.score
    began = 0.0

    def begin(self, step):
        nonlocal began
        began = time.perf_counter()
        on_step_begin(self, step)

    def arrive(*given):
        arrivals.append(time.perf_counter() - began)
        return gather(*given)

    def slow(self, microbatch):
        time.sleep(0.5 if world.rank == 1 else 0.0)
        return score(self, microbatch)

    on_step_begin = KTOObjective.on_step_begin
    monkeypatch.setattr(KTOObjective, "on_step_begin", begin)

    monkeypatch.setattr(Group, "gather_values", arrive)
    monkeypatch.setattr(KTOScorer, "score", slow)
    changes = {"data.balance": "lb_mini", "run.steps": 2, "data.eval_path": None, "run.eval_on_start": False}
    _, summary = train_to_the_end(settings(labels_path, base, **changes), world)
    assert summary == {} or summary["collectives_per_minibatch"] == 4
    assert len(arrivals) == 2, "one all-gather per step"
    assert min(arrivals) > 0.4 if world.rank == 1 else max(arrivals) < 0.4, arrivals


@pytest.mark.sizes(2)
def test_answers_that_are_all_desirable_are_imitated_as_sequences(world, base):
    if world.rank == 0:
        base.mkdir()
        for name, columns in (("plain", None), ("labels", LabelColumns(3, 1))):
            with DatasetWriter(base / f"{name}.h5", vocab_size=61, tokenizer="none", source="random") as writer:
                for length in range(5, 21):
                    tokens = np.arange(length, dtype=np.uint32) * 7 % 61
                    writer.append(tokens, np.arange(length) >= 3, columns)
    world.gather_objects(None)
    found = []
    for name in ("plain", "labels"):
        changes = {"run.exact": True, "run.steps": 3, "run.dir": base / name}
        lines, _ = train_to_the_end(configure(base / f"{name}.h5", **changes), world)
        found.append([line["loss"] for line in lines])
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.sizes(1)
def test_data_of_another_kind_is_refused(world, labels_path, pairs_path, base):
    for path, objective, words in (
        (
            labels_path,
            "dpo",
            "has answers with labels, but run.objective is dpo: set it to kto, or prepare records with",
        ),
        (labels_path, "sft", "has answers with labels, but run.objective is sft: set it to kto, or prepare only what"),
        (pairs_path, "kto", "has pairs of a chosen and a rejected answer, but run.objective is kto: set it to dpo or"),
    ):
        with pytest.raises(AllRanksUserError, match=words):
            train_to_the_end(configure(path, **{"run.objective": objective, "run.dir": base}), world)
