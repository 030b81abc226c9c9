"""Shards in windows over a device's memory, with a device and windows that are late: haste would be noticed."""

import numpy as np
import pytest
import torch
from adversary import late
from late_device import LateDevice
from pretended_nodes import on_pretended_nodes
from units import assert_pushed, assert_sums, random_pushes

from odc_mpi.comm import factory
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.reduce import slots
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.windows.device_window import DeviceWindow

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

SIZES = [1, 7, 33, 1000, 30_001]
#: For each peer: four slots of a page, fewer elements than the larger pushes have.
LITTLE_ROOM = 4 * 4096


LateDeviceWindow = late(DeviceWindow)


@pytest.fixture(params=["accumulate", "mailbox", "mailbox with a thread", "mailbox mapped"])
def make(world, monkeypatch, request, allocate):
    for module in (factory, slots):
        monkeypatch.setattr(module, "DeviceWindow", LateDeviceWindow)

    def build(sizes=SIZES, **dtypes):
        with_thread = request.param.endswith("thread")
        transport = window_transport(
            # Ranks of a pretended node share rings.
            on_pretended_nodes(world) if with_thread and world.size > 2 else world,
            **dtypes,
            comm=CommConfig(
                reduction=request.param.split()[0],
                mailbox_bytes=LITTLE_ROOM * max(1, world.size - 1),
                progress="thread" if with_thread else "off",
            ),
            device=LateDevice(),
            mapped=request.param.endswith("mapped"),
        )
        return allocate(transport, sizes)

    return build


def write_late(transport, values):
    """Have the device write this rank's parameters, some time."""
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(transport.group.rank)
        shard = transport.parameters.shard(index)[: stop - start]
        transport.parameters._device.later(lambda shard=shard, new=values[index][start:stop]: shard.copy_(new))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fetch_has_what_the_owners_devices_wrote_before_they_published(make, dtype):
    transport = make(param_dtype=dtype)
    for generation in range(3):
        values = [(torch.arange(numel) % 100 + generation).to(dtype) for numel in SIZES]
        write_late(transport, values)
        transport.publish_parameters()
        for index, wanted in enumerate(values):
            fetched = transport.parameters.fetch(index).wait()
            assert torch.equal(fetched, wanted)
            assert fetched.untyped_storage().data_ptr() in transport.parameters._device.device_memory
            transport.parameters.release(fetched)
        transport.complete_gradients(np.zeros(1))
    assert not transport.parameters.buffers._in_use and not len(transport.parameters._events)


def test_a_buffer_is_not_overwritten_while_kernels_still_read_it(make):
    transport = make([4000, 4000])
    write_late(transport, [torch.full((4000,), 1.0), torch.full((4000,), 2.0)])
    transport.publish_parameters()
    buffer, seen = transport.parameters.fetch(0).wait(), []
    transport.parameters._device.later(lambda: seen.append(buffer.clone()))
    transport.parameters.record_event(buffer)  # the computation has given the device all that reads it
    transport.parameters.start_fetch(1, buffer).wait()
    assert seen[0].eq(1).all() and buffer.eq(2).all()
    transport.parameters.release(buffer)
    transport.complete_gradients(np.zeros(1))


def test_owners_overwrite_parameters_after_copies_in_flight(make, world):
    transport = make([4000, 4000])
    write_late(transport, [torch.full((4000,), 1.0), torch.full((4000,), 2.0)])
    transport.publish_parameters()
    fetches = [transport.parameters.fetch(index) for index in range(2)]
    for fetch in fetches:
        fetch.work.complete()  # no stream waits for the copy yet
    transport.complete_gradients(np.zeros(1))
    write_late(transport, [torch.full((4000,), 7.0)] * 2)
    transport.publish_parameters()
    for index, fetch in enumerate(fetches):
        assert (fetch.wait() == index + 1).all()
        transport.parameters.release(fetch.buffer)
    transport.complete_gradients(np.zeros(1))


def test_no_copy_is_in_flight_when_memory_is_freed(make):
    transport = make([4000])
    transport.publish_parameters()
    fetch = transport.parameters.fetch(0)
    fetch.work.complete()
    device = transport.parameters._device
    transport.close()
    assert not any(device._in_flight.values())


def test_a_push_adds_what_was_computed_before_its_event(make, world):
    """Integers, so that the sum is exact whatever the order of arrival; the kernels run when they are waited for."""
    transport = make()
    for minibatch in range(2):
        for index, start, values in random_pushes(SIZES, world.rank, minibatch):
            flat = transport.gradients.empty(4 * len(values)).view(torch.float32)
            transport.parameters._device.later(lambda flat=flat, values=values: flat.copy_(values))
            transport.gradients.prepare_push(flat)
            transport.gradients.push(index, flat, start).wait()
            flat.fill_(float("nan"))  # it belongs to the computation again
        transport.complete_gradients(np.zeros(1))
        assert_pushed(world, transport, SIZES, [minibatch])
        for index in range(len(SIZES)):
            transport.parameters._device.later(transport.gradients.shard(index).zero_)
        transport.publish_parameters()


def test_several_pushes_on_the_way(make, world):
    transport = make([5000])
    values = [torch.arange(5000.0) + i for i in range(4)]
    pushes = []
    for gradient in values:
        transport.gradients.prepare_push(gradient)
        pushes.append(transport.gradients.push(0, gradient))
    for push in reversed(pushes):
        push.wait()
        push.wait()
    transport.complete_gradients(np.zeros(1))
    assert_sums(transport, [world.size * sum(values)])


def test_memory_without_an_event_is_not_touched(make):
    transport = make([10])
    with pytest.raises(KeyError):
        transport.gradients.push(0, torch.ones(3))
    with pytest.raises(KeyError):
        transport.parameters.start_fetch(0, torch.ones(10))
