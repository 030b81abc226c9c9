"""Helpers around a device: events, memory and selection."""

import sys

import pytest
import torch
from late_device import LateDevice

from odc_mpi.comm.device.device import BufferDict, _cupy, find_device
from odc_mpi.errors import UserError


@pytest.mark.parametrize(("cuda", "extra"), [("12.9", "cuda12"), ("13.0", "cuda13"), (None, "cuda12")])
def test_without_cupy_a_line_names_the_package(monkeypatch, cuda, extra):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(
        UserError, match=rf"CuPy, which cannot be imported .* install odc_mpi\[{extra}\].* or set it to cpu"
    ):
        _cupy()


def test_an_event_belongs_to_memory_not_to_a_view_of_it():
    events, device, memory = BufferDict(), LateDevice(), torch.zeros(8)
    event = device.record_event()
    events.set(memory[2:], event)
    assert len(events) == 1
    assert events.pop(memory[4:].view(torch.int32)) is event
    with pytest.raises(KeyError):
        events.pop(memory)
    assert len(events) == 0


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("cpu", 0) is None
    with pytest.raises(UserError, match=r"run.device: cuda needs a GPU, torch .* sees none: set it to cpu"):
        find_device("cuda", 0)
