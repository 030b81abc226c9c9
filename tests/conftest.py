"""Fixtures of all tests: under mpiexec one rank prints, and no rank waits for one that failed."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

RANK = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
SIZE = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
#: Fixtures of a session or module that take long to make.
LONG = {"stdlib_samples", "trained", "built"}

# Modules that check on behalf of tests say what did not hold, as these do.
pytest.register_assert_rewrite("crash_cases", "fault_cases", "faults", "mpi_launch", "whole_runs")

# torch and transformers create half a million objects, which each full collection would traverse: not while they are
# imported, and not in the tests.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As of what a shell starts with `&`: whatever a test starts would ignore an interrupt, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if SIZE == 1:
        # As an interrupt, after which fixtures end what a test has started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if SIZE > 1:
        # Ranks that share pytest's own directory clean it up under each other's feet.
        config.option.basetemp = tempfile.mkdtemp(prefix=f"odc_mpi-rank{RANK}-")


def pytest_collection_modifyitems(items):
    # First, so that one worker of pytest-xdist makes them for all: others begin further on, and steal what is last.
    items.sort(key=lambda item: LONG.isdisjoint(item.fixturenames))


def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if RANK and reporter is not None:
        reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process


def pytest_unconfigure(config):
    if SIZE > 1:
        shutil.rmtree(config.option.basetemp, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _files_stay_in_memory():
    """Leave out waits for the disk: what is flushed, and when, is looked at by tests that patch `os.fsync`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def gpu():
    """Skip a test where torch sees no GPU; fail it there if ODC_MPI_REQUIRE_GPU=1."""
    import torch

    if not torch.cuda.is_available():
        required = os.environ.get("ODC_MPI_REQUIRE_GPU") == "1"
        (pytest.fail if required else pytest.skip)(f"torch {torch.__version__} sees no GPU")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if SIZE > 1 and report.failed:
        from odc_mpi.runtime.abort import abort

        # The other ranks would wait for this one in the next collective call, until the launch's deadline.
        abort(f"rank {RANK} of {SIZE}: {item.nodeid} failed in {call.when}\n{report.longreprtext}")
