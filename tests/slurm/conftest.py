"""Tests on a Slurm: skipped with a reason where there can be none; ODC_MPI_REQUIRE_SLURM=1 makes that a failure."""

import pytest
from cluster import Cluster, missing
from slurm_jobs import Directory
from small_run import data  # noqa: F401 - a fixture
from two_hosts import require


@pytest.fixture(scope="session")
def cluster():
    require(missing(), "ODC_MPI_REQUIRE_SLURM")
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory, data):  # noqa: F811
    return Directory(cluster, tmp_path_factory.mktemp("my jobs"), data)
