"""Fixtures of real launches."""

import pytest
from mpi_launch import MPIEXEC
from small_run import config, data, nothing_left_running  # noqa: F401 - fixtures


def pytest_collection_modifyitems(items):
    for item in (item for item in items if "launch" in item.path.parts):
        if MPIEXEC is None:
            item.add_marker(pytest.mark.skip(reason="no mpiexec beside python or on the PATH"))
        if "quick" not in item.keywords:
            item.add_marker(pytest.mark.slow)
