"""Tests on two hosts: skipped with a reason where there can be none; ODC_MPI_REQUIRE_HOSTS=1 makes that a failure."""

import os

import pytest
from small_run import config, data  # noqa: F401 - fixtures
from two_hosts import missing


@pytest.fixture(autouse=True, scope="session")
def two_hosts():
    reason = missing()
    if reason is not None:
        required = os.environ.get("ODC_MPI_REQUIRE_HOSTS") == "1"
        (pytest.fail if required else pytest.skip)(reason)
