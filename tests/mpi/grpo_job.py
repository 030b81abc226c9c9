"""Prompts, rewards and settings of small trainings from rewards."""

import json

import numpy as np
import torch
import transformers
from number_words import number_words
from small_training import QWEN2, configure

from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.data.tokenizer import load_tokenizer

STEPS = 4
NUM_PROMPTS = 14
NUM_GENERATIONS = 4
MAX_LENGTH = 10
END = 60
REWARDS = """
def ends_early(completion_ids, **kwargs):
    return [-float(len(tokens)) / 4 for tokens in completion_ids]


def even(completion_ids, wanted, **kwargs):
    scores = [float(sum(token % 2 == want for token in tokens)) for tokens, want in zip(completion_ids, wanted)]
    return [None if tokens[0] % 7 == 0 else score for tokens, score in zip(completion_ids, scores)]


def equal(completions, **kwargs):
    return [1.0] * len(completions)
"""


def write_files(path):
    """Write prompts of numbers, and rewards, into a new directory."""
    path.mkdir()
    number_words(END).save_pretrained(path / "words")
    draws = np.random.default_rng(3)
    lines = [
        {"prompt": " ".join(map(str, draws.integers(1, 60, size=draws.integers(1, 9)))), "wanted": i % 2, "answer": "1"}
        for i in range(NUM_PROMPTS)
    ]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path / "rewards.py").write_text(REWARDS)


def read_prompt_tokens(path):
    """Return the prompts."""
    return PromptDataset(path / "prompts.jsonl", load_tokenizer(path / "words"))


def make_settings(path, **changes):
    """Return the settings of a run in which changes are made, `rl__beta` for `rl.beta`."""
    usual = {
        "run.objective": "grpo",
        "rl.reward_funcs": f"['{path}/rewards.py:ends_early', '{path}/rewards.py:even']",
        "rl.reward_weights": "[0.5, 1.0]",
        "rl.tokenizer": path / "words",
        "rl.num_generations": NUM_GENERATIONS,
        "rl.max_completion_length": MAX_LENGTH,
        "rl.max_concurrent_sequences": 2 * NUM_GENERATIONS,
        "data.minibatch_sequences": 6 * NUM_GENERATIONS,
        "data.max_tokens_per_microbatch": 60,
        "optim.lr_scheduler_type": "constant",
        "run.steps": STEPS,
    }
    return configure(path / "prompts.jsonl", **usual | {k.replace("__", "."): value for k, value in changes.items()})


def write_teacher(path, **changes):
    """Write a model of the vocabulary of the prompts, but larger than the one that trains."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(**QWEN2 | {"num_hidden_layers": 4, "initializer_range": 0.1} | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def distillation(teacher_path):
    """Return the settings that replace those of GRPO."""
    return {"run__objective": "distill", "rl__teacher_path": teacher_path}


def only_reward(path, name):
    """Return settings with which only one of the rewards counts."""
    return {"rl__reward_funcs": f"['{path}/rewards.py:{name}']", "rl__reward_weights": "[1.0]"}
