import numpy as np
import pytest

from odc_mpi.shard.minibatch_stats import MinibatchStats


@pytest.mark.parametrize("num_parameters", [0, 1, 8, 31, 32, 33, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_know_which_parameters_any_rank_pushed(size: int, num_parameters: int) -> None:
    rng = np.random.default_rng(num_parameters)
    pushed = rng.random((size, num_parameters)) < 0.3
    ranks = [MinibatchStats(["loss", "count"]) for _ in range(size)]
    reports = np.stack(
        [minibatch.report(np.array([0.1]), own.tolist()) for minibatch, own in zip(ranks, pushed, strict=True)]
    )
    assert reports.dtype == np.float64
    for minibatch in ranks:
        minibatch.receive_reports(reports)
        assert minibatch.pushed == pushed.any(axis=0).tolist()


def test_numbers_of_all_ranks() -> None:
    ranks = [MinibatchStats(["loss", "count"]) for _ in range(3)]
    for rank, minibatch in enumerate(ranks):
        minibatch.local["loss"] += rank + 0.5
        minibatch.local["count"] += 1
    reports = np.stack([minibatch.report(np.array([0.25, rank]), [True] * 40) for rank, minibatch in enumerate(ranks)])
    for minibatch in ranks:
        minibatch.receive_reports(reports)
        assert minibatch.per_rank("loss").tolist() == [0.5, 1.5, 2.5]
        assert (minibatch.sum("loss"), minibatch.sum("count")) == (4.5, 3.0)
        assert minibatch.sums.tolist() == [0.75, 3.0]
