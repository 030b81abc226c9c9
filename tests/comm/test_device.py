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
    for is_xpu, sees in ((False, "none"), (True, "only an Intel XPU, which is not supported")):
        monkeypatch.setattr(torch.xpu, "is_available", lambda is_xpu=is_xpu: is_xpu)
        with pytest.raises(UserError, match=rf"run.device: cuda needs a GPU, torch .* sees {sees}: set it to cpu"):
            find_device("cuda", 0)
