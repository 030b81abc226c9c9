"""Every rank is a thread here: one thread for each is enough."""

import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads_and_a_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
