"""Reward models that all ranks train are those of a plain loop, which computes each answer as a sequence of its own."""

import json

import pytest
import torch
import torch_reference
import transformers
from exact_runs import ExactRuns
from pair_files import answer_rows
from small_training import assert_saved, configure, first_minibatches, on_first_rank, train_to_the_end
from torch.nn.functional import logsigmoid

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.export import export

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(1, 2, 3),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]

#: Factor of the loss that centers rewards.
CENTER = 0.3
NAMES = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")


def settings(pairs_path, base, **changes):
    return configure(
        pairs_path,
        **{
            "run.objective": "reward",
            "reward.center_rewards_coefficient": CENTER,
            "data.eval_path": pairs_path.with_suffix(".eval.h5"),
            "run.eval_on_start": True,
            "run.dir": base,
            "model.config.pad_token_id": 0,
            "optim.warmup_steps": 0,
            **changes,
        },
    )


def compute_rewards(module, dataset, indices):
    """The rewards of both answers of each pair, `[pairs, 2]`."""
    rows = answer_rows(dataset, indices)
    return torch.cat([module(input_ids=row[None], use_cache=False).logits for row in rows]).double().reshape(-1, 2)


def compute_loss(module, dataset, indices):
    rewards = compute_rewards(module, dataset, indices)
    return (-logsigmoid(rewards[:, 0] - rewards[:, 1]) + CENTER * rewards.sum(1) ** 2).mean()


@pytest.mark.parametrize(
    ("balance", "num_pairs"),
    [
        pytest.param("lb_mini", 1, marks=pytest.mark.sizes(3)),
        pytest.param("dynamic", 7, marks=pytest.mark.sizes(1, 2)),
    ],
)
def test_losses_and_metrics_of_rewards_are_those_of_a_plain_loop(world, pairs_path, base, balance, num_pairs):
    """With one pair per step, all ranks but one have none."""
    config = settings(pairs_path, base, **{"data.balance": balance, "data.minibatch_sequences": num_pairs})
    lines, summary = train_to_the_end(config, world)

    def compare():
        module = torch_reference.initial_model(config)
        with Dataset(pairs_path) as dataset, torch.no_grad():
            first = compute_rewards(module, dataset, first_minibatches(config, dataset)[0])
        check_metrics(lines[1], "", first)
        with Dataset(pairs_path) as dataset:
            minibatches = first_minibatches(config, dataset)
            losses = torch_reference.train(module, dataset, minibatches, config.optim, compute_loss)
        assert [line["loss"] for line in lines[1:]] == pytest.approx(losses, rel=1e-6)
        assert_saved(base, module)
        with Dataset(pairs_path.with_suffix(".eval.h5")) as held_out, torch.no_grad():
            check_metrics(lines[-1], "eval_", compute_rewards(module, held_out, range(10)))
            loss = compute_loss(module, held_out, range(10)).item()
        assert lines[-1]["eval_loss"] == summary["eval_loss"] == pytest.approx(loss, rel=1e-5)

    on_first_rank(world, compare)


def check_metrics(line, prefix, rewards):
    margins = rewards[:, 0] - rewards[:, 1]
    wanted = {
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "min_reward": rewards.min(),
        "mean_reward": rewards.mean(),
        "max_reward": rewards.max(),
    }
    for name, value in wanted.items():
        assert line[prefix + name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param({}, id="full", marks=pytest.mark.sizes(3)),
        pytest.param({"lora__r": 4}, id="adapters", marks=pytest.mark.sizes(2)),
    ],
)
def test_exact_reward_models_have_the_bits_of_one_rank(world, pairs_path, base, adapters):
    exact = ExactRuns(world, base, lambda folder, changes: settings(pairs_path, folder, **changes))
    changes = {"run__exact": True, "data__balance": "dynamic", "run__steps": 3, **adapters}
    found = exact.train("all", world, **changes)
    assert found == exact.alone(**changes)
    assert found[1][-1].keys() >= {*NAMES, *(f"eval_{name}" for name in NAMES)}


@pytest.mark.sizes(2)
@pytest.mark.parametrize("adapters", [{}, {"lora.r": 4}], ids=["full", "adapters"])
def test_an_exported_reward_model_has_the_same_scores(world, pairs_path, base, adapters):
    """The run starts with a published language model, whose classifier is new, and the export is trained again."""
    published, held_out = base / "published", pairs_path.with_suffix(".eval.h5")
    if world.rank == 0:
        config = configure(pairs_path, **{"run.dir": base})
        torch_reference.initial_model(config).save_pretrained(published)
    world.gather_objects(None)
    start = {"model.config.pad_token_id": None, "model.path": published, "model.config": "{pad_token_id: 0}"}
    changes = {**start, "run.keep_best": True, "run.eval_every": 1, "run.checkpoint_every": 1, **adapters}
    lines, summary = train_to_the_end(settings(pairs_path, base / "run", **changes), world)

    def compare():
        with open_newest_checkpoint(base / "run") as checkpoint:
            files = export(checkpoint, base / "exported", merge=bool(adapters))
            if adapters:
                export(checkpoint, base / "peft")
        assert "generation_config.json" not in files
        content = json.loads((base / "exported" / "config.json").read_text())
        assert content["architectures"] == ["Qwen2ForSequenceClassification"]
        assert content["pad_token_id"] == 0
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(base / "exported").eval()
        assert loaded.config.num_labels == 1
        models = [loaded, load_adapters(published, base / "peft")] if adapters else [loaded]
        with Dataset(held_out) as dataset, torch.no_grad():
            rows = list(answer_rows(dataset, range(10)))
            batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            for model in models:
                rewards = model(batch, attention_mask=(batch != 0).long()).logits.double().reshape(-1, 2)
                assert rewards.mean().item() == pytest.approx(lines[-1]["eval_mean_reward"], abs=1e-5)
                assert rewards.max().item() == pytest.approx(lines[-1]["eval_max_reward"], abs=1e-5)

    on_first_rank(world, compare)
    assert summary["best_checkpoint"] is not None
    # A reward model from a directory keeps its classifier.
    again = settings(pairs_path, base / "again", **start | {"model.path": base / "exported", "run.steps": 1})
    first, _ = train_to_the_end(again, world)
    assert first[0]["eval_mean_reward"] == pytest.approx(lines[-1]["eval_mean_reward"], abs=1e-5)
    # A language model cannot start from it.
    with pytest.raises(AllRanksUserError, match="expected a causal model"):
        train_to_the_end(
            configure(pairs_path, **{"run.objective": "dpo", "model.path": base / "run", "run.dir": base / "no"}), world
        )


def load_adapters(directory, adapters):
    from peft import PeftModel

    base = transformers.AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, pad_token_id=0)
    return PeftModel.from_pretrained(base, adapters).eval()
