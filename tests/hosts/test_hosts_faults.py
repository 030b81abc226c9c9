"""Faults at random moments, in a run that saves: the short form of `make soak`'s."""

import os

import pytest
from faults import endure

#: By default few, and always the same; ODC_MPI_FAULTS says how many, ODC_MPI_SEED which.
NUM_FAULTS = int(os.environ.get("ODC_MPI_FAULTS", "3"))
SEED = int(os.environ.get("ODC_MPI_SEED", "4"))


@pytest.mark.slow
@pytest.mark.timeout(240 + 60 * NUM_FAULTS)
def test_whatever_goes_wrong_a_run_goes_on_or_names_the_rank_and_is_resumed(tmp_path):
    print(f"ODC_MPI_SEED={SEED}")
    ours, without_faults = endure(tmp_path, NUM_FAULTS, SEED)
    assert ours == pytest.approx(without_faults, rel=1e-5)
