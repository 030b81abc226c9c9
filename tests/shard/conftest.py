"""Every rank is a thread here: one thread for each is enough."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Leave most sizes of what is tried in many ways to `make test-all`."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.name == "test_model_parity.py" and given.get("mode", given).get("size") in (1, 4):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def few_threads_and_a_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
