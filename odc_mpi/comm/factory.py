"""The transports there are (`comm.transport`), put together from a group, a parameter store and a gradient store.

Making one is local; `Transport.allocate` is collective. Each is closed with its world at the latest.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from odc_mpi.comm.collective import CollectiveGradients, CollectiveParameters
from odc_mpi.comm.device.device import Device
from odc_mpi.comm.device.device_stores import DeviceGradients, DeviceParameters, DeviceSynchronizer
from odc_mpi.comm.device.single_rank import SingleRankGradients, SingleRankParameters
from odc_mpi.comm.device.staged import PinnedMemory, StagedGradients, StagedParameters
from odc_mpi.comm.group import WorldGroup
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore, WindowGradientStore
from odc_mpi.comm.reduce.device_slots import DeviceSlots
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES, MailboxGradientStore, SlotsFactory
from odc_mpi.comm.reduce.slots import HostSlots
from odc_mpi.comm.transport import Transport
from odc_mpi.comm.windows.device_window import device_windows
from odc_mpi.comm.windows.parameters import ParameterWindows, WindowParameters
from odc_mpi.comm.windows.rma import HOST_WINDOW
from odc_mpi.comm.windows.shared_window import SHARED_WINDOW
from odc_mpi.runtime.library import has_thread_multiple
from odc_mpi.runtime.world import World

#: Makes the gradient store of a world, for elements of a type.
GradientStoreFactory = Callable[[World, torch.dtype], WindowGradientStore]


def gradient_store_factories(
    mailbox_bytes: int = DEFAULT_MAILBOX_BYTES, device: Device | None = None
) -> Mapping[str, GradientStoreFactory]:
    """Return the ways of gradients to their owners, by the values of `comm.reduction`.

    Args:
        mailbox_bytes: Memory of a mailbox, as `MailboxGradientStore` has it.
        device: Of this rank, for windows on devices; None for windows on hosts.
    """
    kind = HOST_WINDOW if device is None else device_windows(device)
    slots: SlotsFactory = HostSlots if device is None else partial(DeviceSlots, device=device)
    return {
        "accumulate": partial(AccumulateGradientStore, kind=kind),
        "mailbox": partial(MailboxGradientStore, mailbox_bytes=mailbox_bytes, slots=slots),
    }


def window_transport(
    world: World,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    *,
    zero_copy: bool = True,
    reduction: GradientStoreFactory = AccumulateGradientStore,
    progress: bool = False,
) -> Transport:
    """Put together shards in windows on the host.

    Args:
        world: The ranks that share every array.
        param_dtype: Of parameters on the way and in the shards.
        reduce_dtype: Of gradients on the way and in the shards.
        zero_copy: Whether ranks of a node read each other's parameters in place.
        reduction: How gradients reach their owners: one of `gradient_store_factories`.
        progress: Whether a thread serves other ranks while this one computes.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    gradients = reduction(world, reduce_dtype)
    group = WorldGroup(world, progress=progress)
    windows = ParameterWindows(world, param_dtype, SHARED_WINDOW if zero_copy else HOST_WINDOW)
    parameters = WindowParameters(windows)
    return Transport(group, parameters, gradients, (windows, gradients), threads=has_thread_multiple())


def device_transport(
    world: World,
    device: Device,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    *,
    reduction: str,
    mailbox_bytes: int = DEFAULT_MAILBOX_BYTES,
    progress: bool = False,
) -> Transport:
    """Put together shards in windows on the memory of devices.

    Args:
        world: The ranks that share every array.
        device: Of this rank; all ranks have one.
        param_dtype: As for `window_transport`.
        reduce_dtype: As for `window_transport`.
        reduction: One of `gradient_store_factories`.
        mailbox_bytes: For a mailbox, memory of the device, as `MailboxGradientStore` has it.
        progress: As for `window_transport`.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    gradients = gradient_store_factories(mailbox_bytes, device)[reduction](world, reduce_dtype)
    # What other ranks ask of MPI in a thread may concern the device's memory, and libraries ask the driver for the
    # calling thread's device.
    world.prepare_threads(device.set_current)
    group = WorldGroup(world, progress=progress, prepare_thread=device.set_current)
    windows = ParameterWindows(world, param_dtype, device_windows(device))
    return Transport(
        group,
        DeviceParameters(windows, device),
        DeviceGradients(gradients, device),
        (DeviceSynchronizer(device), windows, gradients),
        device=device.torch_device,
        threads=has_thread_multiple(),
    )


def single_rank_transport(
    world: World, device: Device, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> Transport:
    """Put together the shards of a single rank in a device's memory, where nothing travels.

    Args:
        world: Of one rank.
        device: Of this rank.
        param_dtype: As for `window_transport`.
        reduce_dtype: As for `window_transport`.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    assert world.size == 1
    parameters, gradients = SingleRankParameters(param_dtype, device), SingleRankGradients(reduce_dtype, device)
    group, hosts = WorldGroup(world), (parameters, gradients)
    # No threads of ours: what a second one gave the device would have no order with what the first one gives it.
    return Transport(group, parameters, gradients, hosts, device=device.torch_device, threads=False)


def collective_transport(
    world: World, param_dtype: torch.dtype = torch.float32, reduce_dtype: torch.dtype = torch.float32
) -> Transport:
    """Put together shards in private memory, reached with MPI's collectives: the baseline.

    Args:
        world: The ranks that share every array.
        param_dtype: As for `window_transport`.
        reduce_dtype: As for `window_transport`.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    group = WorldGroup(world)
    parameters = CollectiveParameters(world, group, param_dtype)
    gradients = CollectiveGradients(world, group, reduce_dtype)
    return Transport(group, parameters, gradients, (parameters, gradients), threads=False, one_sided=False)


def staged(inner: Transport, device: Device) -> Transport:
    """Put pinned memory between a transport on the host and a device where the model computes.

    Args:
        inner: Not allocated yet. Its parts belong to the new transport.
        device: Where the model computes.
    """
    pinned = PinnedMemory(inner.storages, device)
    return Transport(
        inner.group,
        StagedParameters(inner.parameters, device, pinned),
        StagedGradients(inner.gradients, device, pinned),
        (*inner.storages, pinned),
        device=device.torch_device,
        threads=inner.threads,
    )
