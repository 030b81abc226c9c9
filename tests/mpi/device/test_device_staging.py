"""Between a device, with host memory in its place, and windows: through pinned memory; trainings: case_rows.py."""

import numpy as np
import pytest
import torch
from late_device import LateDevice
from pretended_nodes import on_pretended_nodes
from units import assert_sums, write_parameters

from odc_mpi.comm.factory import staged, window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.settings import CommConfig

pytestmark = pytest.mark.mpi


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("registers", [True, False])
def test_a_fetch_is_copied_straight_from_windows_that_the_driver_takes_and_nothing_stays_in_use(world, registers):
    device = LateDevice(can_register=registers)
    transport = staged(window_transport(world), device)
    layout = FlatLayout.build("unit", [ParameterSpec("weight", (50, 7), True)], world.size)
    transport.allocate([layout])
    assert bool(device.registered) == registers
    write_parameters(transport, [torch.arange(350.0)])
    fetched = transport.parameters.fetch(0).wait()
    assert torch.equal(fetched, torch.arange(350.0))
    # Nothing lies in between: on one node a fetch is a view of the windows.
    assert (transport.storages[-1].pool.peak_bytes == 0) == registers
    transport.parameters.release(fetched)
    for factor in (1.0, 2.0):
        gradient = torch.full((350,), factor)
        transport.gradients.prepare_push(gradient)
        transport.gradients.push(0, gradient).wait()
        gradient.fill_(float("nan"))  # it belongs to the computation again
    transport.complete_gradients(np.zeros(1))
    assert_sums(transport, [torch.full((350,), 3 * world.size)])
    assert not transport.parameters._pinned.pool._in_use
    assert not len(transport.parameters._events) and not len(transport.gradients._copies)
    assert not transport.parameters.buffers._in_use
    with pytest.raises(KeyError):
        transport.gradients.push(0, torch.ones(350))  # nothing says when the device has written it
    transport.close()
    assert device.registered == [], "memory goes after the driver has let go of it"


@pytest.mark.sizes(1, 3, 4)
@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("options", [{"node_cache": "off"}, {"zero_copy": "off"}, {}], ids=str)
def test_owners_write_only_after_the_copies_from_their_windows(world, options, registers):
    device = LateDevice(can_register=registers)
    ranks = on_pretended_nodes(world) if world.size > 1 else world
    transport = staged(window_transport(ranks, comm=CommConfig(**options)), device)
    layout = FlatLayout.build("unit", [ParameterSpec("weight", (3, 1007), True)], world.size)
    transport.allocate([layout] * 6)
    for version in range(3):
        values = [torch.arange(3021.0) + index + version for index in range(6)]
        write_parameters(transport, values)
        fetches = [transport.parameters.fetch(index) for index in range(6)]
        for fetch in fetches:
            fetch.work.complete()  # as the fetch thread does: only a stream would wait for the copies
        transport.complete_gradients(np.zeros(1))
        for index in range(6):
            transport.parameters.shard(index).fill_(-1.0)
        for index, fetch in enumerate(fetches):
            assert torch.equal(fetch.wait(), values[index])
            transport.parameters.release(fetch.buffer)
        assert not transport.parameters._pinned.pool._in_use
    transport.close()


@pytest.mark.sizes(4)
def test_only_shards_of_other_nodes_pass_through_pinned_memory(world):
    device = LateDevice()
    transport = staged(window_transport(on_pretended_nodes(world), comm=CommConfig(node_cache="off")), device)
    layout = FlatLayout.build("unit", [ParameterSpec("weight", (4096,), True)], world.size)
    transport.allocate([layout])
    transport.parameters.shard(0).fill_(float(world.rank))
    transport.publish_parameters()
    copies, copy = [], device.copy
    device.copy = lambda target, source, event: copies.append((source.nbytes, source)) or copy(target, source, event)
    transport.parameters.release(transport.parameters.fetch(0).wait())
    window = transport.parameters._inner._window.mapped_memory
    ranges = {source.data_ptr() - window.data_ptr() in range(window.nbytes): size for size, source in copies}
    assert len(copies) == 3 and ranges == {True: 4096, False: 8192}  # two shards of this node, and two others as one
    transport.complete_gradients(np.zeros(1))
    transport.close()
