"""Sums over prompt groups are the same, whichever rank had which group."""

import numpy as np

from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.rl.metrics import GroupSums

PARTS = np.random.default_rng(0).normal(size=12) * 10.0 ** np.arange(-6, 6)


def summed(num_ranks, owners):
    """The total over ranks, each of which adds its groups' parts in two halves, in its own order."""
    ranks = [GroupSums(("loss", "other"), len(PARTS)) for _ in range(num_ranks)]
    for position in owners:
        rank = ranks[owners[position]]
        rank.add("loss", position, PARTS[position] * 0.3)
        rank.add("loss", position, PARTS[position] * 0.7)
        rank.add("other", position, 1.0)
    output = MinibatchStats(ranks[0].gathered_names)
    rows = []
    for rank in ranks:
        output.local.update(zip(rank.gathered_names, rank.local_values(), strict=True))
        rows.append(output.report(np.zeros(0), [True]))
    output.receive_reports(np.stack(rows))
    assert ranks[0].total(output, "other") == len(PARTS)
    return ranks[0].total(output, "loss")


def test_it_does_not_matter_which_rank_had_a_group():
    draws = np.random.default_rng(1)
    alone = summed(1, dict.fromkeys(range(len(PARTS)), 0))
    for num_ranks in (2, 3, 4):
        order = draws.permutation(len(PARTS)).tolist()
        assert summed(num_ranks, {position: int(draws.integers(num_ranks)) for position in order}) == alone
    assert sum(PARTS) != sum(PARTS[::-1])  # the order of these does matter
