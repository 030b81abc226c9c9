"""Functions that launch the CUDA kernels in `src/`, or fall back to torch operators. This module does not use MPI.

    flatten          copies gradients of several dtypes into one flat array and returns the largest magnitude
    add_segments_    adds segments (parts of gradients) to a shard, in order

Each function launches a kernel if the target is a float32 tensor on an NVIDIA GPU, CuPy is installed, and
`ODC_MPI_KERNELS` is not "off". Otherwise it calls torch operators. The results are bitwise identical, except for the
bits of a NaN, but a kernel makes a single pass over the data. CuPy compiles a kernel with NVRTC on first use. Later
processes load it from CuPy's disk cache, `~/.cupy/kernel_cache` or `CUPY_CACHE_DIR`.

Kernels are launched on torch's current stream, as torch operators are. All arguments except the tensors are passed by
value, so nothing is copied to the GPU separately, and the CPU does not wait.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import odc_mpi
from odc_mpi.errors import one_line_message

#: Tensor and its offset in a flat array, in elements: `(offset, tensor)`.
Segment = tuple[int, torch.Tensor]

#: Options for NVRTC, also valid for nvcc. CuPy adds `-ftz=true`, which does not change the results of these kernels.
COMPILE_OPTIONS = ("-std=c++17",)

#: Code of each dtype, and maximum number of segments per launch. Both must match `src/segments.cuh`.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_SEGMENTS = 128
_TABLE = np.dtype(
    [
        ("source", np.uint64, MAX_SEGMENTS),
        ("start", np.int64, MAX_SEGMENTS),
        ("stop", np.int64, MAX_SEGMENTS),
        ("type", np.uint8, MAX_SEGMENTS),
    ]
)

THREADS = 256
#: Number of elements that a block processes at a time (a tile).
BLOCK_NUMEL = 8 * THREADS
#: Maximum number of blocks to launch per multiprocessor, which runs 4 blocks of `flatten` at once. On an H100, 32 was
#: faster than 4 or 8.
BLOCKS_PER_MULTIPROCESSOR = 32


def flatten(segments: Sequence[Segment], flat: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Copy tensors into a flat array and return the largest magnitude. Elements not covered by a tensor become zero.

    Args:
        segments: Pairs of an offset in `flat` and a tensor, in ascending order of offset. Tensors may have any shape,
            dtype, strides and layout, but must not overlap in `flat`.
        flat: Contiguous output array `[n]`, which is overwritten completely.
        largest: Float64 scalar on the same device, overwritten with the result. If None, a new scalar 0 is used.

    Returns:
        A scalar: the maximum of the previous `largest` and the magnitudes in `flat`, or NaN if `flat` contains NaN.
    """
    filled = 0
    for start, tensor in segments:
        assert filled <= start, "segments overlap or are not sorted"
        filled = start + tensor.numel()
    assert filled <= flat.numel(), f"segments end at {filled}, the array at {flat.numel()}"
    if largest is None:
        largest = torch.zeros((), dtype=torch.float64, device=flat.device)
    if _use_torch_fallback(flat):
        return torch.maximum(largest, flatten_with_torch(segments, flat), out=largest)
    inputs = [(start, _as_contiguous_input(tensor, flat)) for start, tensor in segments if tensor.numel()]
    for first, stop, batch in _batches(inputs, flat.numel()):
        _launch("flatten", flat, batch, first, stop, largest.data_ptr())
    return largest


def flatten_with_torch(segments: Sequence[Segment], flat: torch.Tensor) -> torch.Tensor:
    """Do the same as `flatten` without `largest`, but use only torch operators."""
    filled = 0
    for start, tensor in segments:
        if filled < start:
            flat[filled:start].zero_()
        filled = start + tensor.numel()
        # A single pass casts, copies and makes the values contiguous.
        flat[start:filled].view(tensor.shape).copy_(_dense(tensor))
    if filled < flat.numel():
        flat[filled:].zero_()
    return largest_magnitude(flat)


def largest_magnitude(flat: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in `flat`, or NaN if it contains NaN, as a float64 scalar on the same device."""
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).double()


def add_segments_(shard: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Add segments to a shard, in order: each element becomes `((shard + segment 0) + segment 1) + ...`.

    Each segment is cast to the shard's dtype and added, and the sum is rounded to this dtype, so rounding depends only
    on the order of the segments. Other streams must not modify the segments until the enqueued kernels are done.

    Args:
        shard: Contiguous array `[n]` to update in place.
        segments: Pairs of an offset in the shard and a tensor on its device, with any shape and layout. The dtype must
            be floating-point or the shard's. Segments may overlap in the shard, but must not share its memory.
    """
    for start, tensor in segments:
        stop = start + tensor.numel()
        assert 0 <= start <= stop <= shard.numel(), f"segment {start} to {stop} of a shard of {shard.numel()}"
    if _use_torch_fallback(shard):
        add_segments_with_torch_(shard, segments)
        return
    inputs = [(start, _as_contiguous_input(tensor, shard)) for start, tensor in segments if tensor.numel()]
    for i in range(0, len(inputs), MAX_SEGMENTS):
        batch = inputs[i : i + MAX_SEGMENTS]
        # A multiple of the tile size, so that tiles are aligned like the shard.
        first = min(start for start, _ in batch) // BLOCK_NUMEL * BLOCK_NUMEL
        stop = max(start + tensor.numel() for start, tensor in batch)
        _launch("add_segments", shard, batch, first, stop)


def add_segments_with_torch_(shard: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Do the same as `add_segments_`, but use only torch operators."""
    for start, tensor in segments:
        dense = _dense(tensor)
        # The addition itself casts narrower dtypes, without a copy.
        is_narrower = torch.promote_types(dense.dtype, shard.dtype) == shard.dtype
        if dense.is_contiguous():  # one operator instead of two, which take longer than adding a small gradient
            part = shard.as_strided(dense.shape, dense.stride(), shard.storage_offset() + start)
        else:
            part = shard[start : start + dense.numel()].view(dense.shape)
        part.add_(dense if is_narrower else dense.to(shard.dtype))


def kernels_unavailable_reason(device: torch.device) -> str | None:
    """Return the reason for using torch operators instead of kernels on a device, or None if kernels are used.

    Raises RuntimeError if CuPy is installed but cannot be imported.
    """
    if device.type != "cuda":
        return f"they are for NVIDIA GPUs, not for the torch device {device.type}"
    if torch.version.hip:
        return "they are for NVIDIA GPUs, and this torch is built for ROCm"
    if os.environ.get("ODC_MPI_KERNELS") == "off":
        return "ODC_MPI_KERNELS is off"
    if _cupy() is None:
        return "CuPy is not installed: pip install 'odc_mpi[cuda13]', or cuda12, to match torch and the driver"
    return None


def source_dir() -> Path:
    """Return the CUDA source directory, `src`: inside the package if installed, or next to it in a checkout."""
    package = Path(odc_mpi.__file__).parent
    for directory in (package / "src", package.parent / "src"):
        if (directory / "segments.cuh").is_file():
            return directory
    raise FileNotFoundError(f"neither {package / 'src'} nor {package.parent / 'src'} has the sources of the kernels")


def read_source(name: str) -> str:
    """Return the text of `src/NAME.cu` with its header inlined, because CuPy's cache does not detect header changes."""
    directory = source_dir()
    header = (directory / "segments.cuh").read_text().replace("#pragma once\n", "")
    return (directory / f"{name}.cu").read_text().replace('#include "segments.cuh"\n', header)


def _use_torch_fallback(target: torch.Tensor) -> bool:
    assert target.dim() == 1 and target.is_contiguous()
    return target.dtype is not torch.float32 or kernels_unavailable_reason(target.device) is not None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _as_contiguous_input(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Checked first, because with many small gradients, calling the operators below takes longer than the kernel.
    is_readable = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
    if is_readable and tensor.dtype in TYPES and tensor.device == target.device:
        return tensor
    dense = _dense(tensor.detach())
    dtype = dense.dtype if dense.dtype in TYPES else target.dtype
    # The imaginary part of a conjugate is negated only by a flag of the tensor, which a kernel cannot see.
    return dense.to(target.device, dtype).resolve_neg().contiguous()


def _batches(segments: Sequence[Segment], numel: int) -> Iterator[tuple[int, int, Sequence[Segment]]]:
    """Split a flat array into ranges with at most `MAX_SEGMENTS` segments, and yield `(start, stop, segments)`."""
    first = 0
    for i in range(0, max(1, len(segments)), MAX_SEGMENTS):
        stop = segments[i + MAX_SEGMENTS][0] if i + MAX_SEGMENTS < len(segments) else numel
        yield first, stop, segments[i : i + MAX_SEGMENTS]
        first = stop


def _launch(
    name: str, target: torch.Tensor, segments: Sequence[Segment], first: int, stop: int, *more_addresses: int
) -> None:
    table = np.zeros(1, dtype=_TABLE)
    count = len(segments)
    table["source"][0, :count] = [tensor.data_ptr() for _, tensor in segments]
    table["start"][0, :count] = [start for start, _ in segments]
    table["stop"][0, :count] = [start + tensor.numel() for start, tensor in segments]
    table["type"][0, :count] = [TYPES[tensor.dtype] for _, tensor in segments]
    addresses = (np.uint64(address) for address in (target.data_ptr(), *more_addresses))
    arguments = (table, np.int32(count), np.int64(first), np.int64(stop), *addresses)
    if first < stop:
        _run(name, target.device, -(-(stop - first) // BLOCK_NUMEL), arguments)


def _run(kernel: str, device: torch.device, num_blocks: int, arguments: tuple[Any, ...]) -> None:
    cupy = _cupy()
    assert cupy is not None
    stream = _stream(torch.cuda.current_stream(device).cuda_stream)
    max_blocks = BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(device)
    # Both guards, because torch must restore the previous device, whichever one CuPy restores.
    with torch.cuda.device(device), cupy.cuda.Device(device.index), stream:
        _kernel(kernel)((min(num_blocks, max_blocks),), (THREADS,), arguments)


@functools.cache
def _stream(address: int) -> Any:
    cupy = _cupy()
    assert cupy is not None
    return cupy.cuda.Stream.from_external(_Stream(address))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Stream:
    """Stream that implements the CUDA stream protocol, which torch streams do not implement in all versions."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@functools.cache
def _kernel(name: str) -> Any:
    cupy = _cupy()
    assert cupy is not None
    try:
        return cupy.RawModule(code=read_source(name), options=COMPILE_OPTIONS).get_function(name)
    except Exception as error:
        raise RuntimeError(
            f"CuPy {cupy.__version__} cannot build {source_dir() / name}.cu: {one_line_message(error)}. "
            "Set ODC_MPI_KERNELS=off to use torch operators"
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
            "Uninstall it, or set ODC_MPI_KERNELS=off, to use torch operators"
        ) from error
    return cupy
