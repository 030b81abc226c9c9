"""Tests on two hosts: skipped with a reason where there can be none; ODC_MPI_REQUIRE_HOSTS=1 makes that a failure."""

import pytest
from small_run import config, data, nothing_left_running  # noqa: F401 - fixtures
from two_hosts import missing, require


@pytest.fixture(autouse=True, scope="session")
def two_hosts():
    require(missing(), "ODC_MPI_REQUIRE_HOSTS")
