"""Operations on gradients on a GPU, by odc_mpi's CUDA kernels and by torch's operators.

    copy                   a shard in fp32 copied within the GPU's memory, by torch
    add_fp32, add_bf16     additions of an owner, `native.add_segments_`: `SLOTS` segments of that type, each as long as
                           the shard, are added to it
    flatten_fp32, flatten_bf16
                           preparation of a push, `native.flatten`: a unit's gradients of that type, `SEGMENTS` of them
                           with gaps in between, are written to a flat fp32 array, and the largest magnitude is
                           computed
    NAME_torch             the same with torch's operators

GB/s are 10^9 bytes per second. Bytes are those that the task must move with any implementation: inputs read once,
outputs written once. For n elements and k slots of b bytes per element:

    copy      8 n           4 read, 4 written
    add       (8 + k b) n   the shard read and written once, each slot read once
    flatten   b m + 4 n     m elements of gradients read, the full flat array written

A kernel moves only these; torch's operators move more (a pass over the shard for each slot, for example), which is not
counted, so a ratio of GB/s is a ratio of times. `of_copy` is the speed as a multiple of the copy's.

A sequence of operations is queued on the computing stream and waited for at its end. Shards alternate as in
`gpu_windows.py`. Results are checked after the measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_windows import MAX_OPERATIONS, MAX_UNITS, SAMPLE_S, UNITS_BYTES, in_memory, sized_rounds
from measure import entries, seconds

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.kernels import native
from odc_mpi.simulate.events import quartiles

SLOTS = 4
SEGMENTS = 12
#: Maximum number of elements between two segments: alignment leaves such gaps.
GAP = 32
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY = "copy"
TORCH = "_torch"


@dataclass(frozen=True)
class Task:
    """Operation to measure.

    Attributes:
        operations: One for each shard.
        moved_bytes: Bytes of one operation, as counted in the module's docstring.
        is_right: Returns True if all results so far are correct.
    """

    operations: Sequence[Callable[[], object]]
    moved_bytes: int
    is_right: Callable[[], bool]


class Tasks:
    """All tasks on shards of one size.

    Args:
        num_bytes: Size of a shard in fp32.
        with_kernels: Measure the kernels, too, not only torch's operators.

    Raises:
        UserError: GPU memory is insufficient.
    """

    def __init__(self, device: Device, num_bytes: int, with_kernels: bool) -> None:
        self._device = device.torch_device
        self._numel = num_bytes // 4
        self._num_shards = max(1, min(MAX_UNITS, UNITS_BYTES // num_bytes))
        ours = [""] if with_kernels else []
        adds = {TORCH: native.add_segments_with_torch_, "": native.add_segments_}
        flattens = {TORCH: native.flatten_with_torch, "": native.flatten}
        self.by_name: dict[str, Task] = {COPY: self._copy()}
        for kind, dtype in TYPES.items():
            slots = [self._segments([(0, self._numel)] * SLOTS, dtype) for _ in range(self._num_shards)]
            gradients = [self._segments(split_numel(self._numel), dtype) for _ in range(self._num_shards)]
            for who in (*ours, TORCH):
                self.by_name[f"add_{kind}{who}"] = self._add(slots, adds[who])
                self.by_name[f"flatten_{kind}{who}"] = self._flatten(gradients, flattens[who])

    def _shards(self, value: float) -> list[torch.Tensor]:
        return [torch.full((self._numel,), value, device=self._device) for _ in range(self._num_shards)]

    def _segments(self, spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[native.Segment]:
        """Create gradients of ones, of twos and so on: these and all their sums are exact in bf16, too."""
        return [
            (start, torch.full((numel,), i + 1.0, dtype=dtype, device=self._device))
            for i, (start, numel) in enumerate(spans)
        ]

    def _copy(self) -> Task:
        sources, targets = self._shards(3.0), self._shards(0.0)
        copies = [partial(target.copy_, source) for target, source in zip(targets, sources, strict=True)]
        return Task(copies, 8 * self._numel, lambda: bool((targets[0] == 3).all()))

    def _add(self, slots: Sequence[Sequence[native.Segment]], add: Callable[..., object]) -> Task:
        shards = self._shards(0.0)
        added = [0] * self._num_shards

        def operation(i: int) -> None:
            added[i] += sum(range(1, SLOTS + 1))
            add(shards[i], slots[i])

        def is_right() -> bool:
            return all(bool((shard == total).all()) for shard, total in zip(shards, added, strict=True))

        moved = 8 * self._numel + _bytes(slots[0])
        return Task([partial(operation, i) for i in range(self._num_shards)], moved, is_right)

    def _flatten(self, gradients: Sequence[Sequence[native.Segment]], flatten: Callable[..., torch.Tensor]) -> Task:
        flats = self._shards(-1.0)
        largest: list[torch.Tensor] = []

        def operation(i: int) -> None:
            largest[:] = [flatten(gradients[i], flats[i])]

        def is_right() -> bool:
            expected = torch.zeros(self._numel, device=self._device)
            for start, segment in gradients[0]:
                expected[start : start + segment.numel()] = segment
            return torch.equal(flats[0], expected) and float(largest[0]) == len(gradients[0])

        moved = 4 * self._numel + _bytes(gradients[0])
        return Task([partial(operation, i) for i in range(self._num_shards)], moved, is_right)


def _bytes(segments: Sequence[native.Segment]) -> int:
    return sum(segment.nbytes for _, segment in segments)


def split_numel(numel: int) -> list[tuple[int, int]]:
    """Return start and length of each segment of a flat array of `numel` elements, each followed by a gap."""
    step = numel // min(SEGMENTS, numel)
    length = step - min(GAP, step // 2)
    return [(i * step, length) for i in range(min(SEGMENTS, numel))]


def measure_size(device: Device, num_bytes: int, repeats: int, with_kernels: bool) -> dict[str, Any]:
    """Measure all tasks on shards of one size.

    Args:
        device: GPU that no other process uses meanwhile.
        num_bytes: Size of a shard in fp32, a multiple of 4.
        repeats: Number of rounds.
        with_kernels: As for `Tasks`.

    Returns:
        Entry of `kernels` in the object of `gpu.py`.

    Raises:
        UserError: GPU memory is insufficient.
        RuntimeError: A result is wrong.
    """
    tasks: Tasks = in_memory(lambda: Tasks(device, num_bytes, with_kernels))
    samples = {name: partial(_sample, device, task) for name, task in tasks.by_name.items()}
    times = sized_rounds(samples, repeats, SAMPLE_S, MAX_OPERATIONS)
    wrong = [name for name, task in tasks.by_name.items() if not task.is_right()]
    if wrong:
        raise RuntimeError(f"{wrong[0]} gave a wrong result on shards of {num_bytes} bytes")
    moved = {name: task.moved_bytes for name, task in tasks.by_name.items()}
    return {"size_bytes": num_bytes, "slots": SLOTS, "pieces": SEGMENTS, "tasks": task_entries(moved, times)}


def task_entries(moved_bytes: Mapping[str, int], times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the entry `tasks` of a size, from bytes of an operation and its seconds in each round, by name."""
    per_byte = {name: [one / moved_bytes[name] for one in of_task] for name, of_task in times.items()}
    found = entries(per_byte, 1, of_copy=lambda _: COPY, of_torch=lambda name: name + TORCH)
    return {
        name: {"moved_bytes": moved_bytes[name], **entry, "seconds": quartiles(times[name])}
        for name, entry in found.items()
    }


def _sample(device: Device, task: Task, times: int) -> float:
    return seconds(task.operations, times, lambda: device.record_event().synchronize())
