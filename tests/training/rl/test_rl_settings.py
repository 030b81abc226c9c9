"""The section `rl`: it comes back from a file as it was, and what does not fit is one sentence."""

import pytest

from odc_mpi.errors import UserError
from odc_mpi.training.settings import dump, load

GRPO = {"model.path": "m", "data.path": "d", "run.objective": "grpo", "rl.reward_funcs": "exact_match"}


def loaded(**changes):
    settings = GRPO | {key.replace("__", "."): value for key, value in changes.items()}
    return load(None, [f"--{key}={value}" for key, value in settings.items() if value is not None])


def test_it_comes_back_from_a_file(tmp_path):
    config = loaded(rl__reward_funcs="[a.b:c, 'd e.py:f']", rl__reward_weights="[1, 0.5]", rl__store_bytes="2M")
    assert config.rl.reward_funcs == ["a.b:c", "d e.py:f"] and config.rl.reward_weights == [1, 0.5]
    assert config.rl.store_bytes == 2 << 20
    (tmp_path / "job.yaml").write_text(dump(config))
    assert load(tmp_path / "job.yaml") == config


def test_a_run_without_rewards_has_the_section_too(tmp_path):
    config = loaded(run__objective="sft", rl__reward_funcs=None)
    (tmp_path / "job.yaml").write_text(dump(config))
    assert load(tmp_path / "job.yaml") == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run__objective": "sft"}, "rl.reward_funcs requires run.objective grpo"),
        ({"rl__reward_funcs": None}, "requires rl.reward_funcs"),
        ({"model__path": None, "model__config__model_type": "qwen2"}, "requires a tokenizer"),
        ({"rl__reward_weights": "[1, 2]"}, "expected 1, a weight for each of rl.reward_funcs, got 2"),
        ({"rl__reward_weights": "abc"}, "expected a list of numbers"),
        ({"rl__num_iterations": 2}, "strictly on-policy"),
        ({"rl__num_generations": 5}, "a multiple of rl.num_generations, 5, got 16"),
        ({"rl__num_generations": 1}, "2 or more"),
        ({"rl__temperature": 0}, "above 0"),
        ({"rl__loss_type": "bnpo"}, "dapo or grpo or dr_grpo"),
        ({"lora__r": 4, "lora__dropout": 0.1}, "lora.dropout: expected 0"),
        ({"data__balance": "dynamic"}, "data.balance: expected lb_mini with run.objective grpo, got dynamic"),
    ],
)
def test_mismatches_are_reported(changes, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        loaded(**changes)
