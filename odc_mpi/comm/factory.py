"""Functions that build transports (`comm.transport`). They do not communicate.

They raise ValueError if they do not support `param_dtype`, the parameter dtype, or `reduce_dtype`, the gradient dtype.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.device.device_stores import (
    DeviceGradients,
    DeviceParameters,
    SingleRankGradients,
    SingleRankParameters,
)
from odc_mpi.comm.device.staged import PinnedMemory, StagedGradients, StagedParameters, StagedWindowParameters
from odc_mpi.comm.group import Group
from odc_mpi.comm.islands.exchange import IslandExchange
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore, WindowGradientStore
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.reduce.slots import DeviceSlots, HostSlots, MappedDeviceSlots
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.transport import ParameterStore, Transport
from odc_mpi.comm.windows.device_window import DeviceWindow, MappedDeviceWindow
from odc_mpi.comm.windows.node_cache import NodeCache
from odc_mpi.comm.windows.node_scope import NodeScope
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import CAN_DETACH_STORAGE, SharedWindow, Window
from odc_mpi.runtime.library import has_thread_multiple
from odc_mpi.runtime.world import World


def window_transport(
    world: World,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    comm: CommConfig = CommConfig(),
    *,
    device: Device | None = None,
    mapped: bool = False,
    islands: Islands | None = None,
) -> Transport:
    """Build a transport whose shards are in MPI windows.

    Args:
        comm: Settings, of which "auto" means: zero-copy on, a node cache, MPI_Accumulate, no progress thread. Zero-copy
            and the node cache do not apply to a device. A node cache requires zero-copy, `CAN_DETACH_STORAGE`, and a
            world or island that spans several nodes, with several of its ranks on this node; `node_cache` may differ
            between islands. The reduction must be "mailbox" if `mapped` is True. `frozen_scope` is "node" or "world"
            ("auto": world), and only the latter with a device or islands.
        device: Device of the windows and the model, or None for the host. Must be None either on all ranks or on none.
        mapped: If True, the ranks are on one node and map each other's device memory. Requires `device`.
        islands: Islands of `world`, each of which shards the arrays among its own ranks. Requires `device=None`.
    """
    sharing = islands.island if islands else world
    kind: Callable[..., Any] = Window
    slots: Callable[..., HostSlots] = HostSlots
    if device is not None:
        assert islands is None
        # A thread in MPI may access device memory for other ranks, and MPI uses the calling thread's current device.
        world.prepare_threads(device.set_current)
        kind = partial(MappedDeviceWindow if mapped else DeviceWindow, device=device)
        slots = partial(MappedDeviceSlots if mapped else DeviceSlots, device=device)

    def gradient_store(ranks: World) -> WindowGradientStore:
        if comm.reduction == "mailbox":
            return MailboxGradientStore(ranks, reduce_dtype, comm, slots)
        assert not mapped
        return AccumulateGradientStore(ranks, reduce_dtype, kind, on_host=device is None)

    group = Group(world, progress=comm.progress == "thread", islands=islands)
    gradients, thread_safe = gradient_store(sharing), has_thread_multiple()
    if device is not None:
        on_device = DeviceParameters(world, param_dtype, device, kind)
        stores = on_device, DeviceGradients(gradients, device)
        storages = (on_device, gradients)
        return Transport(group, *stores, storages, device=device.torch_device, thread_safe=thread_safe)
    zero_copy = comm.zero_copy != "off"
    parameters = WindowParameters(sharing, param_dtype, SharedWindow if zero_copy else Window)
    transport = Transport(group, parameters, gradients, (parameters, gradients), thread_safe=thread_safe)
    shares = comm.node_cache != "off" and zero_copy and CAN_DETACH_STORAGE
    if shares and sharing.num_nodes > 1 and sharing.local_size > 1:
        cache = NodeCache(parameters)
        transport = replace(transport, parameters=cache, node_cache=cache, storages=(*transport.storages, cache))
    if comm.frozen_scope == "node" and sharing.num_nodes > 1:
        owners = tuple(world.node_ranks)
        cached = [transport.node_cache] if transport.node_cache else []
        scoped = NodeScope(world, transport.parameters, [parameters, *cached])
        transport = replace(transport, parameters=scoped, storages=(scoped, gradients), frozen_owners=owners)
    if islands:
        exchange = IslandExchange(islands, parameters, gradients, gradient_store(islands.column))
        transport = replace(transport, exchange=exchange, storages=(*transport.storages, exchange))
    return transport


def single_rank_transport(
    world: World, device: Device, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> Transport:
    """Build a transport for a single rank, with shards in device memory and without any data transfer."""
    assert world.size == 1
    parameters, gradients = SingleRankParameters(param_dtype, device), SingleRankGradients(reduce_dtype, device)
    storages = (parameters, gradients)
    # Without threads, because kernels enqueued by a second thread would not be ordered with those of the first.
    return Transport(Group(world), parameters, gradients, storages, device=device.torch_device, thread_safe=False)


def staged(inner: Transport, device: Device) -> Transport:
    """Return a transport for a model on a device, with shards in the host windows of the transport `inner`.

    `inner` must come from `window_transport` with `device=None`, and must not have been allocated yet.
    """
    kind: Callable[..., ParameterStore] = StagedParameters if inner.node_cache else StagedWindowParameters
    pinned = PinnedMemory(inner.storages, device)
    return replace(
        inner,
        parameters=kind(inner.parameters, device, pinned),
        gradients=StagedGradients(inner.gradients, device, pinned),
        storages=(*inner.storages, pinned),
        device=device.torch_device,
    )
