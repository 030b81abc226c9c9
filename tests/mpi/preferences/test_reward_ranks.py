"""Reward models that all ranks have trained, exported."""

import json

import pytest
import torch
import torch_reference
import transformers
from pair_files import answer_rows
from small_training import configure, on_first_rank, train_to_the_end

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.export import export

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
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
