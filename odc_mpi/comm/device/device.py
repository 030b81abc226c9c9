"""CUDA device of a rank. This module does not use MPI.

Another stream or MPI may access a buffer only after the kernels that use it have finished, so an event is recorded
after these kernels. Waiting for an event releases the GIL and does not spin. Copies for fetches and for pushes run on a
stream each. No copy or addition synchronizes the whole device.

Memory for MPI windows is allocated by cudaMalloc through CuPy and imported into torch through DLPack, because memory
from the torch allocator may not be exportable to other processes (`expandable_segments`, `cudaMallocAsync`).
"""

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from odc_mpi.comm.kernels.native import Segment, add_segments_
from odc_mpi.errors import UserError, one_line_message

T = TypeVar("T")


class Device:
    """GPU, identified by its index among the GPUs visible to this process.

    Attributes:
        name: GPU model, number of visible GPUs and CUDA version. MPI's behavior may depend on all three.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        num_visible = torch.cuda.device_count()
        platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        self.name = f"{torch.cuda.get_device_name(index)} ({num_visible} visible), {platform}"
        # Of high priority, because the next kernels of the computation wait for their copies and additions.
        self._fetch_stream, self._push_stream, self._add_stream = (
            torch.cuda.Stream(self.torch_device, priority=-1) for _ in range(3)
        )

    def set_current(self) -> None:
        """Make this device the calling thread's current CUDA device, which MPI also uses."""
        torch.cuda.set_device(self.torch_device)

    def free_bytes(self) -> int:
        """Return the free device memory in bytes, including unused memory cached by the torch allocator."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + cached

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized uint8 tensor `[num_bytes]` in device memory.

        Keep it until copies to and from it have completed: the torch allocator only tracks the allocating stream.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty_for_windows(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized uint8 tensor `[num_bytes]` in device memory that can be passed to MPI.

        The call is slow and may wait for all kernels on the device. Raises `UserError` if CuPy cannot be imported or
        the device has too little memory.
        """
        cupy = _cupy()
        try:
            with cupy.cuda.Device(self.torch_device.index):
                memory = self._allocate(max(1, num_bytes), cupy)
                array = cupy.ndarray((num_bytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
                return torch.from_dlpack(array)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise UserError(
                f"windows on {self.torch_device}: expected {num_bytes >> 20} MiB of contiguous memory, "
                f"got {free >> 20} of {total >> 20} MiB free ({error}): use more GPUs, or set comm.window_device to cpu"
            ) from None

    def _allocate(self, num_bytes: int, cupy: Any) -> Any:
        # By cudaMalloc, whichever allocator CuPy is configured to use.
        try:
            return cupy.cuda.Memory(num_bytes)
        except cupy.cuda.runtime.CUDARuntimeError:
            torch.cuda.empty_cache()  # the torch allocator may have cached the missing bytes
            return cupy.cuda.Memory(num_bytes)

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle with which other processes on this node can map `memory`.

        `memory` must be an entire allocation from `empty_for_windows`, and its size must be a multiple of 2 MiB. Raises
        `UserError` if the driver refuses.
        """
        return self._share("export them", lambda runtime: runtime.ipcGetMemHandle(memory.data_ptr()))

    def map(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """Map memory for which `export` returned `handle` in another process on this node, as uint8 `[num_bytes]`.

        Call `unmap` before the other process frees the memory. Raises `UserError` if the driver refuses.
        """
        cupy = _cupy()
        self.set_current()
        address = self._share("map the memory of another rank", lambda runtime: runtime.ipcOpenMemHandle(handle))
        memory = cupy.cuda.UnownedMemory(address, num_bytes, None, self.torch_device.index)
        return torch.from_dlpack(cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)))

    def _share(self, what: str, call: Callable[[Any], T]) -> T:
        runtime = _cupy().cuda.runtime
        try:
            return call(runtime)
        except runtime.CUDARuntimeError as error:
            raise UserError(
                f"windows on {self.torch_device}: CUDA cannot {what} ({error}): set comm.window_device to cpu"
            ) from None

    def unmap(self, memory: torch.Tensor) -> None:
        """Undo `map`. All copies and kernels that use the memory must have completed."""
        self.set_current()
        _cupy().cuda.runtime.ipcCloseMemHandle(memory.data_ptr())

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor `[num_bytes]` in pinned host memory. Raises `UserError` if the driver cannot pin it."""
        # PyTorch's pinned-memory allocator rounds sizes up to powers of two and caches freed memory.
        block = mmap.mmap(-1, max(1, num_bytes))
        memory = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes)
        if not self.register(memory):
            raise UserError(
                f"run.device: cuda needs pinned host memory, but the driver cannot pin {num_bytes} more bytes: "
                "raise the limit of locked memory (ulimit -l), or use fewer ranks per node"
            )
        weakref.finalize(block, self._unregister, memory.data_ptr()).atexit = False
        return memory

    def register(self, memory: torch.Tensor) -> bool:
        """Pin host memory, which is slow. If this returns True, call `unregister` before freeing the memory."""
        self.set_current()
        if memory.numel() == 0:
            return True
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        # The driver reports the error again at the next query, which torch makes after its next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Unpin host memory for which `register` returned True."""
        if memory.numel():
            self._unregister(memory.data_ptr())

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the calling thread's current stream, and return it."""
        return _record(torch.cuda.current_stream(self.torch_device))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, wait_for: torch.cuda.Event) -> torch.cuda.Event:
        """Start an asynchronous copy between pinned host and device memory, or within device memory. Thread-safe.

        The copy waits for the event `wait_for`. The tensors must have the same shape and dtype. Do not access
        `destination` or modify `source` until the returned event has completed.
        """
        stream = self._fetch_stream if destination.is_cuda else self._push_stream
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(wait_for)
            destination.copy_(source, non_blocking=True)
        return _record(stream)

    def upload(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start copying pinned host memory to new device memory. Returns the new tensor and an event.

        The current stream waits for the copy. Do not modify `source` until the event has completed.
        """
        computing = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.stream(self._fetch_stream):
            # This memory belongs to the copy stream, so the copy does not wait for kernels that are enqueued already.
            copy = source.to(self.torch_device, non_blocking=True)
        event = _record(self._fetch_stream)
        computing.wait_event(event)
        copy.record_stream(computing)
        return copy, event

    def copy_to_peer(self, destination: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start an asynchronous copy to another rank's mapped memory. Thread-safe.

        Unlike `copy`, this does not wait for an event: the kernels that compute `source` must already have completed.
        Later fetches do not wait for this copy.
        """
        with torch.cuda.stream(self._push_stream), torch.no_grad():
            destination.copy_(source, non_blocking=True)
        return _record(self._push_stream)

    def finish_fetches(self) -> None:
        """Wait until all copies to the device started by `copy` or `upload` are complete."""
        _record(self._fetch_stream).synchronize()

    def add_segments(self, shard: torch.Tensor, slots: Sequence[Segment]) -> torch.cuda.Event:
        """Start adding tensors to a shard of the same dtype, each at its offset, in order. Thread-safe.

        All earlier kernels that use the shard and all copies that fill the tensors must have finished. Do not modify
        the tensors until the returned event has completed.
        """
        with torch.cuda.stream(self._add_stream), torch.no_grad():
            add_segments_(shard, slots)
        return _record(self._add_stream)

    def _unregister(self, address: int) -> None:
        self.set_current()
        torch.cuda.cudart().cudaHostUnregister(address)


def find_device(kind: str, host_rank: int) -> Device | None:
    """Return a rank's GPU and make it the current CUDA device, or return None if `kind` is "cpu".

    `host_rank` is the rank's `World.host_rank`. Ranks share GPUs if a host has more ranks than GPUs. Raises `UserError`
    if `kind` is "cuda" but no GPU is available.
    """
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}, but" if torch.version.cuda else "is built without CUDA and"
        sees = "only an Intel XPU, which is not supported" if torch.xpu.is_available() else "none"
        raise UserError(f"run.device: cuda needs a GPU, torch {torch.__version__} {built} sees {sees}: set it to cpu")
    index = host_rank % torch.cuda.device_count()
    # Tensors created without a device index, such as a user's own, are then on this GPU, too.
    torch.cuda.set_device(index)
    return Device(index)


def gpu_uuid(host_rank: int) -> str | None:
    """Return the UUID of the GPU that `find_device` assigns to a rank, or None if no GPU is available."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(host_rank % torch.cuda.device_count()).uuid)


def zeros(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zero-filled tensor, `[numel]` of `dtype`, in device memory. Raises `UserError` if too little is free."""
    try:
        return device.empty(numel * dtype.itemsize).view(dtype).zero_()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the shards do not fit into the memory of {device.torch_device} ({one_line_message(error)}): set "
            "comm.window_device to cpu, or use more ranks"
        ) from None


def _cupy() -> Any:
    if torch.version.hip:
        raise UserError("comm.window_device: cuda needs an NVIDIA GPU, but torch is built for ROCm: set it to cpu")
    try:
        import cupy
    except ImportError as error:
        extra = f"cuda{(torch.version.cuda or '12').split('.')[0]}"
        raise UserError(
            f"comm.window_device: cuda allocates windows with CuPy, which cannot be imported ({error}): install "
            f"odc_mpi[{extra}], which matches this torch, or set it to cpu"
        ) from None
    return cupy


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
    event.record(stream)
    return event
