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


def test_the_late_device_computes_when_it_is_waited_for():
    device, done = LateDevice(), []
    device.later(lambda: done.append(1))
    event = device.record_event()
    device.later(lambda: done.append(2))
    assert done == []
    event.synchronize()
    event.synchronize()
    assert done == [1]
    device.record_event().synchronize()
    assert done == [1, 2]


def test_the_late_device_notices_haste():
    device, shard, values = LateDevice(), torch.zeros(4), torch.ones(2)
    event = device.add_segments(shard, [(1, values)])
    values.zero_()
    with pytest.raises(AssertionError, match="slot"):
        event.synchronize()
    assert not shard.any()
    for hasty in ("source", "target"):
        source, target = torch.ones(4), torch.zeros(4)
        copy = device.copy(target, source, device.record_event())
        (source if hasty == "source" else target).fill_(7)
        with pytest.raises(AssertionError, match=hasty):
            copy.synchronize()


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("cpu", 0) is None
    with pytest.raises(UserError, match=r"run.device: cuda needs a GPU, torch .* sees none: set it to cpu"):
        find_device("cuda", 0)
