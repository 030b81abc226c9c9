"""Decisions on merges: the first one counts, and only islands that have the differences of each other are in one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from odc_mpi.errors import UserError
from odc_mpi.islands.contributions import Contributions
from odc_mpi.islands.quorum import Quorum, mutual


def test_of_decisions_that_are_made_at_the_same_time_one_counts(tmp_path):
    quorum = Quorum(2, 0.0, tmp_path)
    with ThreadPoolExecutor(8) as threads:
        for merge in range(1, 51):
            found = list(threads.map(lambda island, n=merge: quorum.decide(n, [island, island + 100]), range(8)))
            assert len({tuple(each) for each in found}) == 1 and found[0][1] == found[0][0] + 100
            assert quorum.read(merge) == found[0]


def test_a_directory_that_does_not_take_links_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"^islands\.quorum: expected a directory for symbolic links, got .*/absent: No"
    ):
        Quorum(2, 0.0, tmp_path / "absent").decide(1, [0, 1])


def test_islands_are_together_only_if_each_has_the_difference_of_each_other():
    have = np.eye(4, dtype=bool)
    assert [mutual(have, island) for island in range(4)] == [[0], [1], [2], [3]]
    have[0, 1] = have[1, 0] = have[0, 2] = have[2, 1] = have[1, 2] = True  # island 2 lacks the difference of island 0
    assert mutual(have, 0) == mutual(have, 1) == [0, 1] and mutual(have, 2) == [1, 2]
    have[2, 0] = have[3, :] = True
    assert mutual(have, 0) == [0, 1, 2] and mutual(have, 3) == [3]
    have[0, 0] = False  # has not shown its own
    assert mutual(have, 0) == [] and mutual(have, 1) == [1, 2]


def test_what_an_island_could_not_contribute_enters_its_next_difference():
    kept = Contributions(2)
    kept.add_step(3)
    taken = kept.take(1)
    assert taken == (3.0, 1, 0) and kept.take(1) == (0.0, 0, 0)
    kept.add_step(4)
    kept.give_back(1, taken)
    kept.miss(1, 6)  # merges 2 to 6, of fragments 1, 0, 1, 0, 1
    restored = Contributions(2)
    restored.load_state_dict(kept.state_dict())
    assert restored.take(1) == (7.0, 2, 3) and restored.take(0) == (7.0, 2, 2)
