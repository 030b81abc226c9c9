"""Data sets of pairs for tests."""

import numpy as np
import torch

from odc_mpi.data.dataset.format import PairCounts
from odc_mpi.data.dataset.writer import DatasetWriter


def write_pairs(path, counts, vocab_size=64, seed=0):
    """Write pairs of random tokens, given the numbers of tokens of prompt, chosen and rejected answer of each.

    All tokens of the answers are loss tokens.
    """
    rng = np.random.default_rng(seed)
    with DatasetWriter(path, vocab_size=vocab_size, tokenizer="none", source="random") as writer:
        for num_prompt, num_chosen, num_rejected in counts:
            tokens = rng.integers(1, vocab_size, num_prompt + num_chosen + num_rejected).astype(np.uint32)
            pair = PairCounts(num_prompt, num_chosen, num_chosen)
            writer.append(tokens, np.arange(len(tokens)) >= num_prompt, pair)


def answer_rows(dataset, indices):
    """Yield the tokens of each chosen and rejected answer, with its prompt before it."""
    for index in indices:
        tokens = torch.from_numpy(dataset[index][0])
        num_prompt, num_chosen, _ = dataset.pair_counts[index]
        yield tokens[: num_prompt + num_chosen]
        yield torch.cat([tokens[:num_prompt], tokens[num_prompt + num_chosen :]])
