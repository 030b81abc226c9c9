"""The device on which a model computes, where that is not the host. Knows no MPI.

A device works off what it is given in its own time, in the order of a stream. Whoever else touches its memory has to
know what was given before: a *mark* stands behind that. Copies between host and device run on streams of their own,
one for each direction, each behind the mark it is given; nothing ever waits for the whole device.

Tests put a device of their own in the place of `CudaDevice`, with host memory for both sides and copies that come late.
"""

from typing import Protocol

import torch

from odc_mpi.errors import UserError


class Mark(Protocol):
    """A place behind everything that a device had been given so far. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Return when the device has done all of it. Local; leaves the core and the GIL to others."""


class Device(Protocol):
    """What staging needs of a device.

    Attributes:
        torch_device: Torch's name of it.
    """

    torch_device: torch.device

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the device, `[num_bytes]` uint8, its content undefined. Local."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can copy to and from by itself, `[num_bytes]` uint8. Local."""

    def mark(self) -> Mark:
        """Return a mark behind what this thread has given the device to compute. Local."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        """Start a copy between pinned and device memory beside the computation. Local; any thread may call it.

        Args:
            destination: Overwritten; nobody touches it until the copy is done.
            source: Of the same shape and dtype; untouched until then.
            after: The copy begins when all before this mark is done.

        Returns:
            A mark behind the copy.
        """


class CudaDevice:
    """A GPU.

    Args:
        index: Of those that this process sees.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._inward = torch.cuda.Stream(self.torch_device)
        self._outward = torch.cuda.Stream(self.torch_device)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """See `Device`.

        torch's allocator takes memory to be used by the stream that computes alone. Ours is written by another, but
        never goes back before whoever waited for the copy has been given it.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        """See `Device`."""
        return _record(torch.cuda.current_stream(self.torch_device))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        """See `Device`."""
        assert isinstance(after, torch.cuda.Event)
        stream = self._inward if destination.is_cuda else self._outward
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(after)
            destination.copy_(source, non_blocking=True)
        return _record(stream)


def find_device(kind: str, local_rank: int) -> CudaDevice | None:
    """Return the device for a rank to compute on, None for the host. Local.

    GPUs are dealt out by local rank; where a node has more ranks than GPUs, they share.

    Args:
        kind: cpu or cuda.
        local_rank: This process's number on its node.

    Raises:
        UserError: There is no such device here.
    """
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}, but" if torch.version.cuda else "is built without CUDA:"
        raise UserError(f"run.device: cuda needs a GPU, torch {torch.__version__} {built} sees none: set it to cpu")
    index = local_rank % torch.cuda.device_count()
    # What is made without naming a device, such as a user's own tensors, is made there too.
    torch.cuda.set_device(index)
    return CudaDevice(index)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: who waits for it sleeps.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
