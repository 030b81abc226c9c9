"""Fetches of units to a GPU and pushes from it, with all transports, compared with plain copies; for `gpu.py`.

    copy_device            a copy of the unit within the GPU's memory
    copy_to_device, copy_to_host
                           between pinned memory and the GPU: the bandwidth of the link
    fetch_host             from windows on the hosts of all owners, through pinned memory
    fetch_host_in_place    the same if ranks of a node read each other's windows directly
    push_host_NAME         the unit's gradient to its owners' hosts, for each reduction
    fetch_device, push_device_NAME
                           the same with windows on the GPUs
    fetch_mapped, push_mapped_mailbox
                           the same with windows on the GPUs that the ranks of a node map

Operations run one after another, as in training, through the same transports. A fetch ends when the unit is on the GPU,
a sequence of pushes when the gradients are complete, a sequence of copies with the event after the last: no operation
that was only started counts as done. Copies of a sequence are queued on one stream, so launch times matter for small
units only.

As in `transport_speed.py` units alternate, values are small whole numbers, and every sum is checked
exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from measure import entries, interleaved, seconds, slowest
from transport_speed import REDUCTIONS, Variant, check, fetches, pushes, require_host_memory, unit_layout

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.factory import staged, window_transport
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError
from odc_mpi.probe.device_decision import summarize
from odc_mpi.probe.device_probe import allocation_error, load_device_report
from odc_mpi.probe.probe import environment_report
from odc_mpi.probe.report import ProbeReport
from odc_mpi.runtime.world import World

#: Minimum bytes of all units together, more than the caches of a GPU (H100: 50 MiB) ...
UNITS_BYTES = 256 << 20
#: ... but at most this number of units: each has a window or two per transport.
MAX_UNITS = 32
#: Approximate seconds of a sample, so that the ranks' common start (0.2 ms) is negligible ...
SAMPLE_S = 0.1
#: ... but it has at most this number of operations.
MAX_OPERATIONS = 1024

#: Minimum free GPU memory for windows.
MIN_BYTES = 1 << 20
#: Reason for omitting windows on GPUs that were not requested.
SET = "set by --window-device"

COPY = "copy_device"
_TO_DEVICE, _TO_HOST = "copy_to_device", "copy_to_host"


class DeviceUnits:
    """Units of one size, in all memory that the variants need. Construction is collective.

    Args:
        device: GPU of this rank; all ranks have one.
        num_bytes: Size of each full unit, a multiple of 4.
        reductions: Reductions to measure with windows on the devices; without any no such window is created.
        mapped: Also measure windows on the devices that ranks map.

    Attributes:
        variants: Operations by name.
        links: For a variant, that of plain copies over the same link.
        num_units: Number of units.
        crossing_bytes: Bytes of a unit that other ranks own.

    Raises:
        UserError: Memory is insufficient, on every rank.
    """

    def __init__(
        self, world: World, device: Device, num_bytes: int, reductions: Sequence[str] = (), *, mapped: bool = False
    ) -> None:
        self.num_units = max(1, min(MAX_UNITS, UNITS_BYTES // num_bytes))
        self._world, self._device = world, device
        self._layout = unit_layout(num_bytes // 4, world.size)
        first, last = self._layout.owned(world.rank)
        self._owned = last - first
        self.crossing_bytes = num_bytes - 4 * self._owned
        self._transports: list[Transport] = []
        self._last: torch.cuda.Event = device.record_event()
        unit = 4 * world.size * self._layout.shard_numel
        # Each rank: two pinned buffers for each unit, and two destinations. All together: parameters and gradients of
        # two transports, a mailbox's slots.
        require_host_memory(world, world.local_size * (2 * self.num_units + 2) * unit + 5 * self.num_units * unit)
        self.variants = world.run_on_all(lambda: in_memory(self._copies))
        self.links: dict[str, str] = {}
        for name in REDUCTIONS:
            zero_copy = name == "mailbox"
            comm = CommConfig(zero_copy="auto" if zero_copy else "off", reduction=name)
            host_windows = window_transport(world, comm=comm)
            self._add(staged(host_windows, device), "fetch_host_in_place" if zero_copy else "fetch_host", "host", name)
        if mapped:
            transport = window_transport(world, comm=CommConfig(reduction="mailbox"), device=device, mapped=True)
            self._add(transport, "fetch_mapped", "mapped", "mailbox")
        for name in reductions:
            self._add(
                window_transport(world, comm=CommConfig(reduction=name), device=device), "fetch_device", "device", name
            )

    def free(self) -> None:
        """Free all memory. Collective."""
        self.variants.clear()
        for transport in reversed(self._transports):
            transport.close()

    def _copies(self) -> dict[str, Variant]:
        device = self._device
        sources, targets = ([self._flat(device.empty) for _ in range(self.num_units)] for _ in range(2))
        pinned, landed = ([self._flat(device.empty_pinned) for _ in range(self.num_units)] for _ in range(2))
        for i in range(self.num_units):
            sources[i].fill_(1.0)
            pinned[i].fill_(2.0)
            targets[i].zero_()
            landed[i].zero_()
        # An event after the kernels that fill them; later copies only follow their own stream.
        filled = device.record_event()
        return {
            COPY: self._copy(targets, sources, 1.0, filled),
            _TO_DEVICE: self._copy(targets, pinned, 2.0, filled),
            _TO_HOST: self._copy(landed, sources, 1.0, filled),
        }

    def _flat(self, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return allocate(self._layout.numel * 4).view(torch.float32)

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], value: float, wait_for: torch.cuda.Event
    ) -> Variant:
        def copy(i: int) -> None:
            self._last = self._device.copy(targets[i], sources[i], wait_for)

        def finish() -> None:
            self._last.synchronize()

        def is_right() -> bool:
            copy(0)
            finish()
            return bool((targets[0] == value).all())

        return Variant([partial(copy, i) for i in range(self.num_units)], is_right, finish=finish)

    def _add(self, transport: Transport, fetch: str, place: str, reduction: str) -> None:
        """Add the variants of a transport: its pushes, and its fetches unless another transport has the same ones."""
        self._transports.append(transport)
        transport.allocate([self._layout] * self.num_units)
        for i in range(self.num_units):
            transport.parameters.shard(i)[: self._owned].fill_(self._world.rank + 1.0)
        transport.publish_parameters()
        self.variants.setdefault(fetch, fetches(transport, self._layout, self.num_units, finish=self._finish))
        push = f"push_{place}_{reduction}"
        self.variants[push] = self._push(transport)
        if place == "host":
            self.links |= {fetch: _TO_DEVICE, push: _TO_HOST}

    def _finish(self) -> None:
        self._device.record_event().synchronize()

    def _push(self, transport: Transport) -> Variant:
        units = range(self.num_units)
        # Each in separate memory, as in a model: an event is recorded for a buffer by its address.
        gradients = self._world.run_on_all(
            lambda: in_memory(lambda: [self._flat(transport.gradients.empty) for _ in units])
        )
        for gradient in gradients:
            gradient.fill_(1.0)

        def push(i: int) -> None:
            transport.gradients.prepare_push(gradients[i])
            transport.gradients.push(i, gradients[i]).wait()

        return pushes(transport, self.num_units, push, self._owned)


def measure_size(
    world: World, device: Device, num_bytes: int, repeats: int, reductions: Sequence[str] = (), *, mapped: bool = False
) -> dict[str, Any]:
    """Measure all variants for units of one size. Collective.

    Args:
        world: Ranks that run the same variant at the same time; the time is that of the slowest.
        num_bytes: Size of a unit, a multiple of 4.
        repeats: Number of rounds.
        reductions, mapped: As for `DeviceUnits`.

    Returns:
        Entry of `sizes` in the object of `gpu.py`.

    Raises:
        UserError: Memory is insufficient, on every rank.
        RuntimeError: Data arrived incorrectly.
    """
    units = DeviceUnits(world, device, num_bytes, reductions, mapped=mapped)
    check(world, units.variants)
    samples = {name: partial(_sample, world, variant) for name, variant in units.variants.items()}
    times = sized_rounds(samples, repeats, SAMPLE_S, MAX_OPERATIONS, partial(slowest, world))
    check(world, units.variants)
    result = {
        "size_bytes": num_bytes,
        "num_units": units.num_units,
        "crossing_bytes": units.crossing_bytes,
        "variants": entries(times, num_bytes, of_copy=lambda _: COPY, of_link=units.links.get),
    }
    units.free()
    return result


def times_in(one_s: float, sample_s: float, most: int) -> int:
    """Return the number of operations of `one_s` seconds in a sample of `sample_s`, from 1 to `most`."""
    return max(1, min(most, round(sample_s / max(one_s, sample_s / most))))


def sized_rounds(
    samples: Mapping[str, Callable[[int], float]],
    repeats: int,
    sample_s: float,
    most: int,
    combine: Callable[[dict[str, list[float]]], dict[str, list[float]]] = lambda times: times,
) -> dict[str, list[float]]:
    """Measure variants in rounds, with as many consecutive operations as take about `sample_s`.

    Collective if the variants are.

    Args:
        samples: By name, a function of the number of operations that returns the seconds of one.
        repeats: Number of rounds.
        sample_s: Seconds of a sequence of operations.
        most: Maximum number of operations of a sequence.
        combine: Makes the times the same on every rank.

    Returns:
        Seconds of an operation in each round.
    """
    # The first sequence touches memory for the first time: the second one determines the length of the others.
    first = combine(interleaved({name: partial(sample, 1) for name, sample in samples.items()}, 2))
    rows = {name: partial(sample, times_in(first[name][-1], sample_s, most)) for name, sample in samples.items()}
    return combine(interleaved(rows, repeats))


def in_memory(allocate: Callable[[], Any]) -> Any:
    """Call a function that allocates GPU memory; convert an out-of-memory error to a UserError.

    Raises:
        UserError: GPU memory is insufficient.
    """
    try:
        return allocate()
    except torch.OutOfMemoryError as error:
        errors = str(error).split(". ")[0]
        raise UserError(
            f"the GPU's memory does not hold the units ({errors}): free some of it, or use smaller --sizes"
        ) from None


def _sample(world: World, variant: Variant, times: int) -> float:
    world.wait_collective(world.comm.Ibarrier(), "starting a sequence of operations")
    seconds_per_operation = seconds(variant.operations, times, variant.finish)
    variant.proceed()
    return seconds_per_operation


def reduction_objections(world: World, device: Device, window_device: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Collective."""
    kept = load_device_report(world, device)
    objections = judge(kept if kept is not None else environment_report(world), window_device)
    if len(objections) == len(REDUCTIONS):
        return objections
    error = allocation_error(world, device, MIN_BYTES)
    return dict.fromkeys(REDUCTIONS, error) if error else objections


def judge(report: ProbeReport, window_device: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Does not communicate."""
    if window_device == "cpu":
        return dict.fromkeys(REDUCTIONS, SET)
    if window_device == "auto":
        findings = summarize(report)
        return (
            dict.fromkeys(REDUCTIONS, findings.objection) if findings.objection else dict(findings.reduction_objections)
        )
    # Requested unconditionally; but the benchmark ends if an operation delivers wrong data.
    objections = {}
    for kind in report.kinds:
        for name, operation in (("accumulate", "accumulate"), ("mailbox", "put")):
            if any(report.wrong_data(f"device {kind} {needed}") for needed in (operation, "get")):
                objections[name] = "in odc-mpi doctor it delivered wrong data"
    return objections


def left_out(objections: dict[str, str]) -> dict[str, str]:
    """Return the variants that need windows on devices and have none, each with the reason."""
    reasons = {f"push_device_{name}": reason for name, reason in objections.items()}
    if len(objections) == len(REDUCTIONS):
        reasons = {"fetch_device": next(iter(objections.values())), **reasons}
    return reasons
