"""Data sets of pairs for runs on all ranks."""

import numpy as np
import pytest
from pair_files import write_labeled, write_pairs

VOCAB = 61


@pytest.fixture(scope="session")
def pairs_path(world, shared_dir):
    """Forty pairs, and ten held-out ones, with prompts and answers of 1 to 15 tokens."""
    path = shared_dir / "pairs.h5"
    if world.rank == 0:
        counts = np.random.default_rng(3).integers(1, 16, (50, 3)).tolist()
        write_pairs(path, counts[:40], VOCAB)
        write_pairs(path.with_suffix(".eval.h5"), counts[40:], VOCAB, seed=1)
    world.gather_objects(None)
    return path


@pytest.fixture(scope="session")
def labels_path(world, shared_dir):
    """Forty answers with labels, and ten held-out ones, with prompts and answers of 1 to 15 tokens."""
    path = shared_dir / "labels.h5"
    if world.rank == 0:
        counts = np.random.default_rng(4).integers(1, 16, (50, 2)).tolist()
        write_labeled(path, counts[:40], VOCAB)
        write_labeled(path.with_suffix(".eval.h5"), counts[40:], VOCAB, seed=1)
    world.gather_objects(None)
    return path
