"""Data sets of pairs, and groups of sampled completions, for tests."""

import numpy as np
import torch

from odc_mpi.data.dataset.format import COLUMNS
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.prompt_group import Answer, PromptGroup


def write_pairs(path, counts, vocab_size=64, seed=0):
    """Write pairs of random tokens, given the numbers of tokens of prompt, chosen and rejected answer of each.

    All tokens of the answers are loss tokens.
    """
    rng = np.random.default_rng(seed)
    with DatasetWriter(path, vocab_size=vocab_size, tokenizer="none", source="random") as writer:
        for num_prompt, num_chosen, num_rejected in counts:
            tokens = rng.integers(1, vocab_size, num_prompt + num_chosen + num_rejected).astype(np.uint32)
            pair = dict(zip(COLUMNS["pairs"], (num_prompt, num_chosen, num_chosen), strict=True))
            writer.append(tokens, np.arange(len(tokens)) >= num_prompt, pair)


def write_labeled(path, counts, vocab_size=64, seed=0):
    """Write prompts and answers of random tokens, given the numbers of tokens of each. Every third is undesirable."""
    rng = np.random.default_rng(seed)
    with DatasetWriter(path, vocab_size=vocab_size, tokenizer="none", source="random") as writer:
        for i, (num_prompt, num_answer) in enumerate(counts):
            tokens = rng.integers(1, vocab_size, num_prompt + num_answer).astype(np.uint32)
            columns = {"num_prompt_tokens": num_prompt, "label": int(i % 3 > 0)}
            writer.append(tokens, np.arange(len(tokens)) >= num_prompt, columns)


def answer_rows(dataset, indices):
    """Yield the tokens of each chosen and rejected answer, with its prompt before it."""
    for index in indices:
        tokens = torch.from_numpy(dataset[index][0])
        num_prompt, num_chosen, _ = (column[index] for column in dataset.columns.values())
        yield tokens[: num_prompt + num_chosen]
        yield torch.cat([tokens[:num_prompt], tokens[num_prompt + num_chosen :]])


def rollout_group(prompt, completions, logps=None, advantages=None, index=0):
    """Return a group as GRPO trains on it, by default with zeros as log-probabilities and ones as advantages."""
    logps = logps or [np.zeros(len(tokens), np.float32) for tokens in completions]
    advantages = np.ones(len(completions)) if advantages is None else np.array(advantages)
    answers = [
        Answer(np.array(tokens, np.uint32), np.ones(len(tokens), np.bool_), {"logps": each, "advantage": advantage})
        for tokens, each, advantage in zip(completions, logps, advantages, strict=True)
    ]
    return PromptGroup(index, np.array(prompt, np.uint32), answers)


def random_groups(counts, vocab_size=64, seed=0):
    """Return groups of random tokens, given the numbers of tokens of the prompt and of the answers of each."""
    rng = np.random.default_rng(seed)
    groups = []
    for i, (num_prompt, *num_tokens) in enumerate(counts):
        prompt, *answers = (rng.integers(1, vocab_size, count).tolist() for count in (num_prompt, *num_tokens))
        logps = [rng.normal(size=count).astype(np.float32) for count in num_tokens]
        groups.append(rollout_group(prompt, answers, logps, rng.normal(size=len(answers)), 10 * i))
    return groups
