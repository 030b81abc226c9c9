"""The only door to what `src/` builds: kernels for GPUs, and torch's operators where there are none.

    flatten      lays gradients of several dtypes into one flat array and finds the largest magnitude
    add_slots    adds what others have put into an owner's slots, in their order

Each runs as a kernel where the tensors are on an NVIDIA GPU and CuPy is installed, and as torch's operators elsewhere;
the results are the same to the last bit, but for the bits of a NaN. A kernel takes one pass where torch takes several.
CuPy is imported when the first kernel is, and compiles it then, with NVRTC; the next process finds it in CuPy's cache
on disk, `~/.cupy/kernel_cache` or CUPY_CACHE_DIR. Nothing here communicates.

Note: streams
    A kernel is launched on torch's current stream of the tensors' device, so in one order with torch's own operators,
    and follows their rules: what was made on another stream has to be waited for first, and memory goes back to torch's
    allocator as after any operator. What a launch needs besides travels with it, by value: nothing has to be kept until
    the kernel has run, nothing is copied, nobody waits.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import odc_mpi
from odc_mpi.errors import one_line_message

#: Where a tensor begins in a flat array, in elements, and the tensor.
Segment = tuple[int, torch.Tensor]

#: For NVRTC; nvcc takes them, too. CuPy adds -ftz=true, against which the sources guard themselves.
COMPILE_OPTIONS = ("-std=c++17",)

#: The same in `src/pieces.cuh`: how types are numbered, and how many pieces one launch takes.
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
MAX_SEGMENTS = 128
_TABLE = np.dtype(
    [
        ("source", np.uint64, MAX_SEGMENTS),
        ("start", np.int64, MAX_SEGMENTS),
        ("stop", np.int64, MAX_SEGMENTS),
        ("type", np.uint8, MAX_SEGMENTS),
    ]
)
#: What kernels write, by the end of their names.
_TARGETS = {torch.float32: "float32", torch.float64: "float64"}

THREADS = 256
#: Elements that a block works through at a time.
BLOCK_NUMEL = 8 * THREADS
#: Blocks of a launch for each multiprocessor, at most; it runs 4 of `flatten` at once. On an H100 32 beat 4 and 8.
BLOCKS_PER_MULTIPROCESSOR = 32


def flatten(segments: Sequence[Segment], flat: torch.Tensor) -> torch.Tensor:
    """Lay tensors into a flat array, zeros between them, and find the largest magnitude in it.

    Nobody waits for a device: the result is there when what this thread has given it so far is done.

    Args:
        segments: Where each tensor begins in `flat`, and the tensor: of any shape, dtype, strides and layout. In order,
            none over another.
        flat: `[n]`, contiguous; all of it is overwritten.

    Returns:
        The largest magnitude of what is in `flat` now, a scalar, float64, on its device. NaN if there is one.
    """
    filled = 0
    for start, piece in segments:
        assert filled <= start, "pieces overlap or are out of order"
        filled = start + piece.numel()
    assert filled <= flat.numel(), f"pieces end at {filled}, the array at {flat.numel()}"
    if _use_torch_fallback(flat):
        return flatten_with_torch(segments, flat)
    plain = [(start, _as_contiguous_input(piece, flat)) for start, piece in segments if piece.numel()]
    largest = torch.zeros((), dtype=torch.float64, device=flat.device)
    for first, stop, run in _batches(plain, flat.numel()):
        _launch("flatten", flat, run, first, stop, largest.data_ptr())
    return largest


def flatten_with_torch(segments: Sequence[Segment], flat: torch.Tensor) -> torch.Tensor:
    """Do what `flatten` does, with torch's operators."""
    filled = 0
    for start, piece in segments:
        if filled < start:
            flat[filled:start].zero_()
        filled = start + piece.numel()
        # One pass casts, lays out and makes contiguous.
        flat[start:filled].view(piece.shape).copy_(_dense(piece))
    if filled < flat.numel():
        flat[filled:].zero_()
    return largest_magnitude(flat)


def largest_magnitude(flat: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in an array, a scalar, float64, on its device; NaN if there is one."""
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).double()


def add_segments_(shard: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Add slots to a shard in their order: each element becomes `((shard + slot 0) + slot 1) + ...`.

    Slots are cast to the shard's dtype before they are added, and every sum is rounded to it: so the result depends on
    their order, and on nothing else. What no slot reaches is not touched. Nobody waits for a device: slots are to stay
    as they are until what this thread has given it so far is done.

    Args:
        shard: `[n]`, contiguous.
        segments: Where each slot begins in the shard, and the slot: of any shape, layout and floating-point dtype, on the
            shard's device. They may overlap one another, but not the shard's memory.
    """
    for start, slot in segments:
        stop = start + slot.numel()
        assert 0 <= start <= stop <= shard.numel(), f"slot {start} to {stop} of a shard of {shard.numel()}"
    if _use_torch_fallback(shard):
        add_segments_with_torch_(shard, segments)
        return
    plain = [(start, _as_contiguous_input(slot, shard)) for start, slot in segments if slot.numel()]
    for i in range(0, len(plain), MAX_SEGMENTS):
        run = plain[i : i + MAX_SEGMENTS]
        # From a multiple of a block's elements on, so that these are aligned as the shard is.
        first = min(start for start, _ in run) // BLOCK_NUMEL * BLOCK_NUMEL
        stop = max(start + slot.numel() for start, slot in run)
        _launch("add_slots", shard, run, first, stop)


def add_segments_with_torch_(shard: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Do what `add_segments_` does, with torch's operators: one pass for each slot."""
    for start, slot in segments:
        dense = _dense(slot)
        # What is narrower is cast on the way, without a copy.
        exact = torch.promote_types(dense.dtype, shard.dtype) == shard.dtype
        values = dense if exact else dense.to(shard.dtype)
        shard[start : start + slot.numel()].view(slot.shape).add_(values)


def kernels_unavailable_reason(device: torch.device) -> str | None:
    """Return the reason for torch's operators instead of kernels on a device; None if kernels run.

    Raises:
        RuntimeError: CuPy is installed, but cannot be imported.
    """
    if device.type != "cuda":
        return f"they are for NVIDIA GPUs, not for torch's device {device.type}"
    if torch.version.hip:
        return "they are for NVIDIA GPUs, and this torch is built for ROCm"
    if os.environ.get("ODC_MPI_KERNELS") == "off":
        return "ODC_MPI_KERNELS is off"
    if _cupy() is None:
        return "CuPy is not installed: pip install 'odc_mpi[cuda13]', or cuda12, as torch and the driver have it"
    return None


def source_dir() -> Path:
    """Return where the sources are: in the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: In neither.
    """
    package = Path(odc_mpi.__file__).parent
    for place in (package / "src", package.parent / "src"):
        if (place / "pieces.cuh").is_file():
            return place
    raise FileNotFoundError(f"neither {package / 'src'} nor {package.parent / 'src'} has the sources of the kernels")


def read_source(name: str) -> str:
    """Return the source of `src/NAME.cu` with what it includes.

    In one text, for CuPy's cache looks at the text and at no file that it includes.
    """
    places = source_dir()
    header = (places / "pieces.cuh").read_text().replace("#pragma once\n", "")
    return (places / f"{name}.cu").read_text().replace('#include "pieces.cuh"\n', header)


def _use_torch_fallback(target: torch.Tensor) -> bool:
    assert target.dim() == 1 and target.is_contiguous()
    return target.dtype not in _TARGETS or kernels_unavailable_reason(target.device) is not None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _as_contiguous_input(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Make a tensor one that a kernel can read: itself, as a rule."""
    # Asked first: of many small gradients the operators below take longer to call than the kernel to run.
    is_plain = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
    if is_plain and tensor.dtype in TYPES and tensor.device == target.device:
        return tensor
    dense = _dense(tensor.detach())
    dtype = dense.dtype if dense.dtype in TYPES else target.dtype
    # Imaginary parts of conjugates are negative by a flag only, which a pointer does not tell.
    return dense.to(target.device, dtype).resolve_neg().contiguous()


def _batches(segments: Sequence[Segment], numel: int) -> Iterator[tuple[int, int, Sequence[Segment]]]:
    """Cut a flat array into stretches with as many pieces as a launch takes: the first element, the end, the pieces."""
    first = 0
    for i in range(0, max(1, len(segments)), MAX_SEGMENTS):
        stop = segments[i + MAX_SEGMENTS][0] if i + MAX_SEGMENTS < len(segments) else numel
        yield first, stop, segments[i : i + MAX_SEGMENTS]
        first = stop


def _launch(
    name: str, target: torch.Tensor, segments: Sequence[Segment], first: int, stop: int, *more_addresses: int
) -> None:
    """Launch a kernel over elements `first` to `stop` of a flat array, on torch's current stream."""
    table = np.zeros(1, dtype=_TABLE)
    count = len(segments)
    table["source"][0, :count] = [piece.data_ptr() for _, piece in segments]
    table["start"][0, :count] = [start for start, _ in segments]
    table["stop"][0, :count] = [start + piece.numel() for start, piece in segments]
    table["type"][0, :count] = [TYPES[piece.dtype] for _, piece in segments]
    addresses = (np.uint64(address) for address in (target.data_ptr(), *more_addresses))
    arguments = (table, np.int32(count), np.int64(first), np.int64(stop), *addresses)
    if first < stop:
        _run(name, f"{name}_{_TARGETS[target.dtype]}", target.device, -(-(stop - first) // BLOCK_NUMEL), arguments)


def _run(file: str, kernel: str, device: torch.device, num_blocks: int, arguments: tuple[Any, ...]) -> None:
    cupy = _cupy()
    assert cupy is not None
    stream = _stream(torch.cuda.current_stream(device).cuda_stream)
    most = BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(device)
    with _device_guard(device, cupy), stream:
        _kernel(file, kernel)((min(num_blocks, most),), (THREADS,), arguments)


def _device_guard(device: torch.device, cupy: ModuleType) -> AbstractContextManager[object]:
    """Make a device the current one meanwhile. As a rule it is, and nothing is done: a launch takes long enough."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    both = ExitStack()
    # Both: torch has to find the one again that it left, whatever CuPy takes for the one before.
    both.enter_context(torch.cuda.device(device))
    both.enter_context(cupy.cuda.Device(device.index))
    return both


@functools.cache
def _stream(address: int) -> Any:
    """Return CuPy's name of a stream; torch has few, and keeps them as long as the process lasts."""
    cupy = _cupy()
    assert cupy is not None
    return cupy.cuda.Stream.from_external(_Stream(address))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Stream:
    """A stream as CuPy asks for one, which torch's own are not in every version."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@functools.cache
def _kernel(file: str, kernel: str) -> Any:
    """Load a kernel; CuPy keeps it for each device."""
    cupy = _cupy()
    assert cupy is not None
    try:
        return cupy.RawModule(code=read_source(file), options=COMPILE_OPTIONS).get_function(kernel)
    except Exception as error:
        raise RuntimeError(
            f"CuPy {cupy.__version__} cannot build {source_dir() / file}.cu: {one_line_message(error)}. "
            "ODC_MPI_KERNELS=off goes on with torch's operators"
        ) from error


@functools.cache
def _cupy() -> ModuleType | None:
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        import cupy
    except Exception as error:
        raise RuntimeError(
            f"CuPy is installed, but cannot be imported: {one_line_message(error)}. "
            "Uninstall it, or set ODC_MPI_KERNELS=off, to go on with torch's operators"
        ) from error
    return cupy
