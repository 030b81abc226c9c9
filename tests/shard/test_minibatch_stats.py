import numpy as np
import pytest

from odc_mpi.shard.minibatch_stats import MinibatchStats


@pytest.mark.parametrize("num_parameters", [0, 1, 8, 31, 32, 33, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_know_which_parameters_any_rank_pushed(size: int, num_parameters: int) -> None:
    rng = np.random.default_rng(num_parameters)
    pushed = rng.random((size, num_parameters)) < 0.3
    ranks = [MinibatchStats(["loss", "count"]) for _ in range(size)]
    for rank, minibatch in enumerate(ranks):
        minibatch.local["loss"] += rank + 0.5
        minibatch.local["count"] += 1
    reports = np.stack(
        [ranks[rank].report(np.array([0.25, rank]), of_rank.tolist()) for rank, of_rank in enumerate(pushed)]
    )
    assert reports.dtype == np.float64
    for minibatch in ranks:
        minibatch.receive_reports(reports)
        assert minibatch.pushed == pushed.any(axis=0).tolist()
        assert minibatch.per_rank("loss").tolist() == [rank + 0.5 for rank in range(size)]
        assert (minibatch.sum("count"), minibatch.sums.tolist()) == (size, [0.25 * size, sum(range(size))])
