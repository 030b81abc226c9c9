"""Tests on a Slurm: skipped with a reason where there can be none; ODC_MPI_REQUIRE_SLURM=1 makes that a failure."""

import os

import pytest
from cluster import Cluster, missing
from slurm_jobs import Directory
from small_run import data  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def cluster():
    reason = missing()
    if reason is not None:
        required = os.environ.get("ODC_MPI_REQUIRE_SLURM") == "1"
        (pytest.fail if required else pytest.skip)(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory, data):  # noqa: F811
    return Directory(cluster, tmp_path_factory.mktemp("my jobs"), data)
