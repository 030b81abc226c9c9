import pytest

from odc_mpi.runtime.library import is_mpich, library_name


@pytest.mark.parametrize(
    ("version", "name", "family"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "MPICH 5.0.2", True),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.4 (ANL base 3.4)\nMPI BUILD : x", "CRAY MPICH 8.1.29.4", True),
        ("Intel(R) MPI Library 2021.12 for Linux* OS\n", "Intel(R) MPI Library 2021.12", True),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : x\n", "MVAPICH2 2.3.7", True),
        ("Open MPI v5.0.11, package: Open MPI root@mpich Distribution, ident: 5", "Open MPI v5.0.11", False),
        ("Other", "Other", False),
    ],
)
def test_a_library_is_named_and_its_family_recognized(version, name, family):
    assert library_name(version) == name
    assert is_mpich(version) == is_mpich(name) == family
