"""The kernels compiled for the host: the same tables, launch by launch, without CuPy."""

import ctypes
import math
import mmap
import shutil

import numpy as np
import pytest
import torch
from host_kernels import HostKernels
from kernel_cases import (
    DTYPES,
    TARGETS,
    add_naively,
    assert_add_segments_as_torch,
    assert_casts,
    assert_flatten_as_torch,
    assert_same,
    assert_same_number,
    flatten_naively,
    random_values,
)

from odc_mpi.comm.kernels import native

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")

#: Threads of a block and blocks.
GRIDS = [(1, 1), (3, 2), (4, 7), (32, 2)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def kernels(built, monkeypatch):
    monkeypatch.setattr(native, "_run", built.run)
    monkeypatch.setattr(native, "kernels_unavailable_reason", lambda device: None)
    built.threads, built.blocks = 3, 2
    built.launches.clear()
    return built


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_flatten_is_torch_s_to_the_bit(kernels, dtype, grid):
    kernels.threads, kernels.blocks = grid
    for seed in range(25):
        rng = np.random.default_rng(seed)
        assert_flatten_as_torch(rng, dtype, int(rng.integers(1, 12)), 200, 0.1 * (seed % 2))
    assert len(kernels.launches) <= 25 and set(kernels.launches) == {f"flatten_{str(dtype).split('.')[1]}"}


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_add_segments_is_torch_s_to_the_bit(kernels, dtype, grid):
    kernels.threads, kernels.blocks = grid
    for seed in range(25):
        rng = np.random.default_rng(seed)
        numel, num_slots = int(rng.integers(1, 500)), int(rng.integers(0, 7))
        assert_add_segments_as_torch(rng, dtype, numel, num_slots, 0.1 * (seed % 2))
    assert len(kernels.launches) <= 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_value_of_two_bytes_is_cast_right(kernels, dtype, target):
    assert_casts(dtype, target)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_more_segments_than_a_launch_takes(kernels, dtype):
    rng = np.random.default_rng(3)
    for count, launches in [
        (0, 1),
        (native.MAX_SEGMENTS, 1),
        (native.MAX_SEGMENTS + 1, 2),
        (3 * native.MAX_SEGMENTS, 3),
    ]:
        segments = [(8 * i + i % 3, torch.from_numpy(rng.normal(size=1 + i % 5))) for i in range(count)]
        kernels.launches.clear()
        flat = torch.full((8 * count + 3,), math.nan, dtype=dtype)
        largest = native.flatten(segments, flat)
        wanted, wanted_largest = flatten_naively(segments, flat.numel(), dtype)
        assert_same(flat, wanted)
        assert_same_number(largest, wanted_largest)
        assert len(kernels.launches) == launches
        shard = torch.from_numpy(rng.normal(size=flat.numel())).to(dtype)
        slots = [segments[i] for i in rng.permutation(count)] + segments
        wanted = add_naively(shard, slots)
        native.add_segments_(shard, slots)
        assert_same(shard, wanted)


def test_indices_beyond_32_bits(kernels):
    """Arrays that only would be as large: nothing is touched but the end of them."""
    far = 5 * 2**31 + 32
    # Mapped memory lies high: below that of a small heap there are no addresses for the rest of the arrays.
    source, flat = before_a_hole(500, torch.bfloat16), before_a_hole(600, torch.float32)
    source.copy_(random_values(np.random.default_rng(1), (500,), torch.bfloat16))
    flat.fill_(-7.0)
    table = np.zeros(1, dtype=native._TABLE)
    table["source"][0, 0] = (source.data_ptr() - far * source.itemsize) % 2**64
    table["stop"][0, 0], table["type"][0, 0] = far + 500, native.TYPES[source.dtype]
    largest = torch.zeros((), dtype=torch.float64)
    target = np.uint64((flat.data_ptr() - far * flat.itemsize) % 2**64)
    arguments = (table, np.int32(1), np.int64(far), np.int64(far + 510), target)
    kernels.run("flatten", "flatten_float32", flat.device, 1, (*arguments, np.uint64(largest.data_ptr())))
    assert_same(flat[:500], source.float())
    assert not flat[500:510].any() and (flat[510:] == -7).all()
    assert_same_number(largest, float(source.abs().max()))
    kernels.run("add_segments", "add_segments_float32", flat.device, 1, arguments)
    assert_same(flat[:500], 2 * source.float())
    assert not flat[500:510].any() and (flat[510:] == -7).all()


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_nothing_is_accessed_beyond_the_end(kernels, source, target):
    """Place arrays before a page whose access would end the process."""
    for numel in range(1, 60):
        segment, flat = before_a_hole(numel, source), before_a_hole(numel + numel % 3, target)
        segment.copy_(torch.arange(numel))
        native.flatten([(numel % 3, segment)], flat)
        native.add_segments_(flat, [(numel % 3, segment), (0, segment)])
        assert float(flat[-1]) == (2 if numel % 3 else 3) * (numel - 1)


def before_a_hole(numel, dtype):
    """Memory that ends where no other begins."""
    whole = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory = torch.frombuffer(whole, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(memory.data_ptr() + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return memory[mmap.PAGESIZE - numel * dtype.itemsize : mmap.PAGESIZE].view(dtype)


def test_the_table_is_the_kernels_own(kernels):
    header = (native.source_dir() / "segments.cuh").read_text()
    assert f"constexpr int MAX_SEGMENTS = {native.MAX_SEGMENTS};" in header
    assert f"constexpr int MAX_THREADS = {native.THREADS};" in header
    assert f"constexpr int QUADS_PER_THREAD = {native.BLOCK_NUMEL // native.THREADS // 4};" in header
    # With the other arguments, what a launch may carry on any GPU.
    assert native._TABLE.itemsize + 64 <= 4096
