"""Every rank is a thread here: one thread for each is enough."""

from pathlib import Path

import pytest
import torch
from adversary import PoisonedPool

#: Sizes with numbers of units ahead that `make test` tries: each number once, each size.
QUICK = {(2, 0), (3, 1), (2, 2)}


def pytest_collection_modifyitems(items):
    """Leave most sizes of what is tried in many ways to `make test-all`."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        size = given.get("mode", given).get("size")
        is_quick = (size, given["prefetch"]) in QUICK if "prefetch" in given else size not in (1, 4)
        if {"staying", "checkpointing"} <= set(given):
            is_quick = given["staying"] == 5 or given["checkpointing"] == bool(given["prefetch"])
        elif item.path.name != "test_model_parity.py":
            continue
        if not is_quick:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def few_threads_and_a_seed(monkeypatch):
    monkeypatch.setattr("odc_mpi.shard.gradients.BufferPool", PoisonedPool)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
