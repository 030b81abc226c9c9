"""Staging between a device and another transport, with a device that is late and notices haste."""

import numpy as np
import pytest
import rank_threads
import torch
from late_device import LateDevice
from local_transport import LocalTransport
from ranks import LateTransport

from odc_mpi.comm.device.device import find_device
from odc_mpi.comm.factory import staged
from odc_mpi.comm.transport import Access
from odc_mpi.comm.work import FetchWork, Work
from odc_mpi.errors import UserError

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
HOSTS = pytest.mark.parametrize("kind", ["copies", "views", "late"])


class ViewTransport(LocalTransport):
    """Its fetches are the memory in which the shards are, as over shared windows."""

    access = Access.VIEW

    def fetch(self, index):
        shards = [self._group.parameters[owner][index] for owner in range(self.size)]
        return FetchWork(torch.cat(shards)[: self.layouts[index].numel], Work())

    def release(self, fetched):
        fetched.fill_(float("nan"))  # a late reader would notice


TRANSPORTS = {"copies": LocalTransport, "views": ViewTransport, "late": LateTransport}


def run(size, kind, work, **dtypes):
    return rank_threads.run(size, lambda *rank: staged(TRANSPORTS[kind](*rank, **dtypes), LateDevice()), work)


@SIZES
@HOSTS
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_a_fetch_brings_every_owner_s_part_to_the_device(size, kind, param_dtype):
    def work(transport):
        for i, layout in enumerate(transport.parameters.layouts):
            first, last = layout.owned(transport.group.rank)
            transport.parameters.shard(i)[: last - first] = (torch.arange(first, last) % 256 + i).to(param_dtype)
        transport.publish_parameters()
        for _ in range(3):
            for i, layout in enumerate(transport.parameters.layouts):
                array = transport.parameters.fetch(i).wait()
                assert torch.equal(array, (torch.arange(layout.numel) % 256 + i).to(param_dtype))
                assert array.untyped_storage().data_ptr() in transport.parameters._device.device_memory
                transport.parameters.release(array)
        parameters = transport.parameters
        assert not parameters.buffers._in_use and not parameters._pinned.pool._in_use and not len(parameters._events)

    run(size, kind, work, param_dtype=param_dtype)


@SIZES
@HOSTS
def test_a_push_adds_what_the_device_had_at_its_event(size, kind):
    every = rank_threads.draw_pushes(size, (0, 1, 3))
    pushes = [[push for push in own if push[2].numel()] for own in every]  # none is empty where a model computes

    def work(transport):
        transport.publish_parameters()
        for i, start, gradient in pushes[transport.group.rank]:
            on_device = gradient.clone()
            transport.gradients.record_event(on_device)
            transport.gradients.push(i, on_device, start).wait()
            on_device.fill_(float("nan"))  # it belongs to the computation again
        assert not transport.parameters._pinned.pool._in_use and not len(transport.gradients._events)
        transport.complete_gradients(np.zeros(1))
        return [transport.gradients.shard(i).clone() for i in range(4)]

    rank_threads.assert_sums(pushes, run(size, kind, work))


def test_memory_without_an_event_is_not_touched():
    def work(transport):
        with pytest.raises(KeyError):
            transport.gradients.push(0, torch.ones(3))
        with pytest.raises(KeyError):
            transport.parameters.start_fetch(0, torch.ones(transport.parameters.layouts[0].numel))

    run(1, "copies", work)


def test_the_late_device_notices_haste():
    device = LateDevice()
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
