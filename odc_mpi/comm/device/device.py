"""The device on which a model computes, where that is not the host. Knows no MPI.

A device works off what it is given in its own time, in the order of a stream. Whoever else touches its memory has to
know what was given before: a *mark* stands behind that. Copies between host and device run on streams of their own,
one for each direction, each behind the mark it is given; nothing ever waits for the whole device.

Memory that MPI is given is allocated by itself, through CuPy, which torch then sees through DLPack. torch's own may
come from a pool of which no other process can be shown a part (`expandable_segments`, `cudaMallocAsync`).

Tests put a device of their own in the place of `Device`, with host memory for both sides and copies that come late.
"""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from odc_mpi.comm.kernels.native import Segment, add_segments_
from odc_mpi.errors import UserError


class Event(Protocol):
    """A place behind everything that a device had been given so far. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait until the device has done all of it. Local; leaves the core and the GIL to others."""


class Device:
    """A GPU.

    Args:
        index: Of those that this process sees.

    Attributes:
        torch_device: Torch's name of it.
        name: Its model, how many this process sees, what torch drives it with: by which it may behave otherwise.
        num_visible: How many this process sees.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.num_visible = torch.cuda.device_count()
        self.name = f"{torch.cuda.get_device_name(index)} ({self.num_visible} visible), CUDA {torch.version.cuda}"
        self._h2d_stream = torch.cuda.Stream(self.torch_device)
        self._d2h_stream = torch.cuda.Stream(self.torch_device)
        self._add_stream = torch.cuda.Stream(self.torch_device)

    def set_current(self) -> None:
        """Make it the one that this thread's calls are about, those of an MPI library too. Local; costs little."""
        torch.cuda.set_device(self.torch_device)

    def free_bytes(self) -> int:
        """Return how much of its memory nobody uses, what torch's allocator keeps for what comes included."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + kept

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the device, `[num_bytes]` uint8, its content undefined.

        torch's allocator takes memory to be used by the stream that computes alone. Ours is written by another, but
        never goes back before whoever waited for the copy has been given it.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty_for_windows(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the device that MPI may be given, `[num_bytes]` uint8, its content undefined.

        Slow, and may wait for all that the device was given: not for use within a step.

        Raises:
            UserError: CuPy is not installed, or there is too little memory.
        """
        cupy = _cupy()
        with cupy.cuda.Device(self.torch_device.index):
            try:
                memory = self._allocate(max(1, num_bytes), cupy)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                free, total = torch.cuda.mem_get_info(self.torch_device)
                raise UserError(
                    f"windows on {self.torch_device}: expected {num_bytes >> 20} MiB of its memory in one piece, "
                    f"{free >> 20} of {total >> 20} MiB are free ({error}): use more ranks, or set "
                    "comm.window_device to cpu"
                ) from None
            array = cupy.ndarray((num_bytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
            return torch.from_dlpack(array)

    def _allocate(self, num_bytes: int, cupy: Any) -> Any:
        """Return memory by cudaMalloc, whatever allocator CuPy was told to use."""
        try:
            return cupy.cuda.Memory(num_bytes)
        except cupy.cuda.runtime.CUDARuntimeError:
            torch.cuda.empty_cache()  # what torch keeps for later is memory, too
            return cupy.cuda.Memory(num_bytes)

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can copy to and from by itself, `[num_bytes]` uint8.

        It goes back to the system when nobody looks at it any more. Not torch's pinned memory, which rounds sizes up to
        powers of two and keeps what is let go of.

        Raises:
            UserError: The driver pins no more memory.
        """
        block = mmap.mmap(-1, max(1, num_bytes))
        memory = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes)
        if not self.register(memory):
            raise UserError(
                f"run.device: cuda copies by way of pinned host memory, the driver pins no {num_bytes} bytes more: "
                "raise the limit of locked memory (ulimit -l), or use fewer ranks on this node"
            )
        weakref.finalize(block, self._unregister, memory.data_ptr()).atexit = False
        return memory

    def register(self, memory: torch.Tensor) -> bool:
        """Let the device copy to and from host memory that exists by itself; return whether it can.

        Slow: the driver pins every page. Until `unregister`, which comes before the memory goes.
        """
        self.set_current()
        if memory.numel() == 0:
            return True
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        # The driver keeps the error for whoever asks next, which torch does after its next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`, which has returned True."""
        if memory.numel():
            self._unregister(memory.data_ptr())

    def record_event(self) -> Event:
        """Return a mark behind what this thread has given the device to compute."""
        return _record(torch.cuda.current_stream(self.torch_device))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, wait_for: Event) -> Event:
        """Start a copy beside the computation, between pinned and device memory or within the latter.

        Any thread may call it.

        Args:
            destination: Overwritten; nobody touches it until the copy is done.
            source: Of the same shape and dtype; untouched until then.
            wait_for: The copy begins when all before this mark is done.

        Returns:
            A mark behind the copy.
        """
        assert isinstance(wait_for, torch.cuda.Event)
        stream = self._h2d_stream if destination.is_cuda else self._d2h_stream
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(wait_for)
            destination.copy_(source, non_blocking=True)
        return _record(stream)

    def add(self, shard: torch.Tensor, slots: Sequence[Segment]) -> Event:
        """Start to add slots to a shard, in their order, beside the computation. Local; any thread may call it.

        Args:
            shard: `[n]` on the device. What was given before that touches it is done.
            slots: On the device, of the shard's dtype; untouched until the mark. What fills them is done.

        Returns:
            A mark behind this addition and all that were started before.
        """
        with torch.cuda.stream(self._add_stream), torch.no_grad():
            add_segments_(shard, slots)
        return _record(self._add_stream)

    def _unregister(self, address: int) -> None:
        self.set_current()
        torch.cuda.cudart().cudaHostUnregister(address)


class BufferEvents:
    """The marks behind what was given before some memory was handed over. Any thread may call it."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}

    def set(self, memory: torch.Tensor, event: Event) -> None:
        """Note the mark that whoever takes this memory over has to wait for."""
        self._events[memory.untyped_storage().data_ptr()] = event

    def pop(self, memory: torch.Tensor) -> Event:
        """Return the mark of memory that was handed over; it is forgotten.

        Raises:
            KeyError: It was not handed over.
        """
        return self._events.pop(memory.untyped_storage().data_ptr())

    def __len__(self) -> int:
        return len(self._events)


def find_device(kind: str, host_rank: int) -> Device | None:
    """Return the device for a rank to compute on, None for the host.

    GPUs are dealt out by the number on the host; where it has more ranks than GPUs, they share.

    Args:
        kind: cpu or cuda.
        host_rank: This process's number on its host, as `World.host_rank` has it.

    Raises:
        UserError: There is no such device here.
    """
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}, but" if torch.version.cuda else "is built without CUDA and"
        raise UserError(f"run.device: cuda needs a GPU, torch {torch.__version__} {built} sees none: set it to cpu")
    index = host_rank % torch.cuda.device_count()
    # What is made without naming a device, such as a user's own tensors, is made there too.
    torch.cuda.set_device(index)
    return Device(index)


def zeros(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of a device, `[numel]` of zeros."""
    return device.empty(numel * dtype.itemsize).view(dtype).zero_()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        extra = f"cuda{(torch.version.cuda or '12').split('.')[0]}"
        raise UserError(
            f"comm.window_device: cuda allocates windows with CuPy, which does not import ({error}): install "
            f"odc_mpi[{extra}], which goes with this torch, or set it to cpu"
        ) from None
    return cupy


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: who waits for it sleeps.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
