"""Helpers around a device: events, memory and selection."""

import sys

import pytest
import torch

from odc_mpi.comm.device.device import _cupy, find_device
from odc_mpi.errors import UserError


@pytest.mark.parametrize(("cuda", "extra"), [("12.9", "cuda12"), ("13.0", "cuda13"), (None, "cuda12")])
def test_without_cupy_a_line_names_the_package(monkeypatch, cuda, extra):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(
        UserError, match=rf"CuPy, which cannot be imported .* install odc_mpi\[{extra}\].* or set it to cpu"
    ):
        _cupy()


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("cpu", 0) is None
    with pytest.raises(UserError, match=r"run.device: cuda needs a GPU, torch .* sees none: set it to cpu"):
        find_device("cuda", 0)
