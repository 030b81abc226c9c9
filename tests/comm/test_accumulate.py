import pytest

from odc_mpi.comm.reduce.accumulate import MAX_WINDOWS, windows_per_array


@pytest.mark.parametrize(
    ("library", "num_ranks", "num_arrays", "expected"),
    [
        ("MPICH 5.0.2", 1, 10, 1),
        ("MPICH 5.0.2", 2, 10, 2),
        ("MPICH 5.0.2", 64, 10, 4),
        ("MPICH 5.0.2", 64, 300, 2),
        ("MPICH 5.0.2", 64, 3000, 1),
        ("MPICH 5.0.2", 2, 0, 2),
        ("CRAY MPICH 8.1.29.4", 64, 10, 4),
        ("Open MPI 5.0.11", 64, 10, 1),
    ],
)
def test_windows_of_an_array(library, num_ranks, num_arrays, expected):
    assert windows_per_array(library, num_ranks, num_arrays) == expected


def test_all_windows_together_stay_below_the_limit():
    assert all(n * windows_per_array("MPICH 5.0.2", 8, n) <= MAX_WINDOWS for n in range(1, MAX_WINDOWS + 1))
