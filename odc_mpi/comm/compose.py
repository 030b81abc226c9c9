"""The transports there are (`comm.transport`), put together from a group, a parameter store and a gradient store.

Making one is local; `Transport.allocate` is collective. Each is closed with its world at the latest.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from odc_mpi.comm.collective import CollectiveGradients, CollectiveParameters
from odc_mpi.comm.device.alone import OwnGradients, OwnParameters
from odc_mpi.comm.device.device import Device
from odc_mpi.comm.device.device_stores import DeviceGradients, DeviceOrder, DeviceParameters
from odc_mpi.comm.device.staged import PinnedMemory, StagedGradients, StagedParameters
from odc_mpi.comm.group import WorldGroup
from odc_mpi.comm.reduce.accumulate import AccumulateReduction, Reduction
from odc_mpi.comm.reduce.device_slots import DeviceSlots
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES, MailboxReduction, MakeSlots
from odc_mpi.comm.reduce.slots import HostSlots
from odc_mpi.comm.transport import Transport
from odc_mpi.comm.windows.device_window import device_windows
from odc_mpi.comm.windows.parameters import ParameterWindows, WindowParameters
from odc_mpi.comm.windows.rma import HOST_WINDOWS
from odc_mpi.comm.windows.shared_window import SHARED_WINDOWS
from odc_mpi.runtime.library import threads_may_call_together
from odc_mpi.runtime.world import World

#: Makes the gradient store of a world, for elements of a type.
MakeReduction = Callable[[World, torch.dtype], Reduction]


def reductions(mailbox_bytes: int = DEFAULT_MAILBOX_BYTES, device: Device | None = None) -> Mapping[str, MakeReduction]:
    """Return the ways of gradients to their owners, by the values of `comm.reduction`. Local.

    Args:
        mailbox_bytes: Memory of a mailbox, as `MailboxReduction` has it.
        device: Of this rank, for windows on devices; None for windows on hosts.
    """
    kind = HOST_WINDOWS if device is None else device_windows(device)
    slots: MakeSlots = HostSlots if device is None else partial(DeviceSlots, device=device)
    return {
        "accumulate": partial(AccumulateReduction, kind=kind),
        "mailbox": partial(MailboxReduction, mailbox_bytes=mailbox_bytes, slots=slots),
    }


def window_transport(
    world: World,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    *,
    zero_copy: bool = True,
    reduction: MakeReduction = AccumulateReduction,
    progress: bool = False,
) -> Transport:
    """Put together shards in windows on the host. Local.

    Args:
        world: The ranks that share every array.
        param_dtype: Of parameters on the way and in the shards.
        reduce_dtype: Of gradients on the way and in the shards.
        zero_copy: Whether ranks of a node read each other's parameters in place.
        reduction: How gradients reach their owners: one of `reductions`.
        progress: Whether a thread serves other ranks while this one computes.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    gradients = reduction(world, reduce_dtype)
    group = WorldGroup(world, progress=progress)
    windows = ParameterWindows(world, param_dtype, SHARED_WINDOWS if zero_copy else HOST_WINDOWS)
    parameters = WindowParameters(windows)
    return Transport(group, parameters, gradients, (windows, gradients), threads=threads_may_call_together())


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
    """Put together shards in windows on the memory of devices. Local.

    Args:
        world: The ranks that share every array.
        device: Of this rank; all ranks have one.
        param_dtype: As for `window_transport`.
        reduce_dtype: As for `window_transport`.
        reduction: One of `reductions`.
        mailbox_bytes: For a mailbox, memory of the device, as `MailboxReduction` has it.
        progress: As for `window_transport`.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    gradients = reductions(mailbox_bytes, device)[reduction](world, reduce_dtype)
    # What other ranks ask of MPI in a thread may concern the device's memory, and libraries ask the driver for the
    # calling thread's device.
    world.prepare_threads(device.use)
    group = WorldGroup(world, progress=progress, begin_thread=device.use)
    windows = ParameterWindows(world, param_dtype, device_windows(device))
    return Transport(
        group,
        DeviceParameters(windows, device),
        DeviceGradients(gradients, device),
        (DeviceOrder(device), windows, gradients),
        device=device.torch_device,
        threads=threads_may_call_together(),
    )


def alone_transport(world: World, device: Device, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> Transport:
    """Put together the shards of a single rank in a device's memory, where nothing travels. Local.

    Args:
        world: Of one rank.
        device: Of this rank.
        param_dtype: As for `window_transport`.
        reduce_dtype: As for `window_transport`.

    Raises:
        ValueError: A type cannot travel, or cannot be summed.
    """
    assert world.size == 1
    parameters, gradients = OwnParameters(param_dtype, device), OwnGradients(reduce_dtype, device)
    group, hosts = WorldGroup(world), (parameters, gradients)
    # No threads of ours: what a second one gave the device would have no order with what the first one gives it.
    return Transport(group, parameters, gradients, hosts, device=device.torch_device, threads=False)


def collective_transport(
    world: World, param_dtype: torch.dtype = torch.float32, reduce_dtype: torch.dtype = torch.float32
) -> Transport:
    """Put together shards in private memory, reached with MPI's collectives: the baseline. Local.

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


def staged(host: Transport, device: Device) -> Transport:
    """Put pinned memory between a transport on the host and a device where the model computes. Local.

    Args:
        host: Not allocated yet. Its parts belong to the new transport.
        device: Where the model computes.
    """
    pinned = PinnedMemory(host.hosts, device)
    return Transport(
        host.group,
        StagedParameters(host.parameters, device, pinned),
        StagedGradients(host.gradients, device, pinned),
        (*host.hosts, pinned),
        device=device.torch_device,
        threads=host.threads,
    )
