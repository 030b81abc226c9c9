"""The kernels beside torch's operators: compiled for the host, launch by launch, and on a GPU (`make test-gpu`).

Without a GPU its tests are skipped, unless ODC_MPI_REQUIRE_GPU=1.
"""

import ctypes
import math
import mmap
import os
import shutil

import numpy as np
import pytest
import torch
from host_kernels import HostKernels
from kernel_cases import (
    DTYPES,
    add_naively,
    assert_add_segments_as_torch,
    assert_flatten_as_torch,
    assert_same,
    assert_same_number,
    flatten_naively,
    random_values,
)

from odc_mpi.comm.kernels import native

#: Threads of a block and blocks.
GRIDS = [(1, 1), (3, 2), (4, 7), (32, 2)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there")
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def kernels(built, monkeypatch):
    monkeypatch.setattr(native, "_run", built.run)
    monkeypatch.setattr(native, "kernels_unavailable_reason", lambda device: None)
    built.threads, built.blocks, built.num_launches = 3, 2, 0
    return built


@pytest.fixture(scope="module")
def gpu():
    leave_out = pytest.fail if os.environ.get("ODC_MPI_REQUIRE_GPU") == "1" else pytest.skip
    if not torch.cuda.is_available():
        leave_out(f"torch {torch.__version__} sees no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = native.kernels_unavailable_reason(device)
    if reason is not None:
        leave_out(f"no kernels: {reason}")
    flat = torch.empty(1, device=device)
    native.flatten([(0, flat.clone())], flat)  # builds them
    native.add_segments_(flat, [(0, flat.clone())])
    return device


@pytest.fixture(params=[*GRIDS, "gpu"], ids=str)
def device(request):
    """The host, with blocks of these sizes, or a GPU."""
    if request.param == "gpu":
        return request.getfixturevalue("gpu")
    kernels = request.getfixturevalue("kernels")
    kernels.threads, kernels.blocks = request.param
    return torch.device("cpu")


def test_flatten_is_torch_s_to_the_bit(device):
    on_host = device.type == "cpu"
    for seed in range(30):
        rng = np.random.default_rng(seed)
        count, longest = int(rng.integers(1, 12 if on_host else 300)), int(rng.choice([40, 5000, 60_000]))
        assert_flatten_as_torch(rng, count, 200 if on_host else longest, 0.1 * (seed % 2), device)


def test_add_segments_is_torch_s_to_the_bit(device):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        numel = int(rng.integers(1, 500)) if device.type == "cpu" else int(rng.choice([1, 7, 4096, 500_001]))
        assert_add_segments_as_torch(rng, numel, int(rng.integers(0, 9)), 0.1 * (seed % 2), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_two_bytes_is_cast_right(device, dtype):
    """As torch casts on the host."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    flat = torch.empty(every.numel(), device=device)
    assert math.isnan(float(native.flatten([(0, every.to(device))], flat)))
    assert_same(flat, every.float())
    sums = torch.zeros(every.numel(), device=device)
    native.add_segments_(sums, [(0, every.to(device))])
    assert_same(sums, 0 + every.float())


def test_more_segments_than_a_launch_takes(kernels):
    rng = np.random.default_rng(3)
    for count, launches in zip([0, 128, 129, 384], [1, 1, 2, 3], strict=True):
        segments = [(8 * i + i % 3, torch.from_numpy(rng.normal(size=1 + i % 5))) for i in range(count)]
        kernels.num_launches = 0
        flat = torch.full((8 * count + 3,), math.nan)
        largest = native.flatten(segments, flat)
        wanted, wanted_largest = flatten_naively(segments, flat.numel(), torch.float32)
        assert_same(flat, wanted)
        assert_same_number(largest, wanted_largest)
        assert kernels.num_launches == launches
        shard = torch.from_numpy(rng.normal(size=flat.numel())).float()
        slots = [segments[i] for i in rng.permutation(count)] + segments
        wanted = add_naively(shard, slots)
        native.add_segments_(shard, slots)
        assert_same(shard, wanted)


def test_no_kernel_writes_to_an_array_of_float64(kernels):
    """Kernels write float32."""
    flat, values = torch.full((9,), math.nan, dtype=torch.float64), torch.tensor([1e-9, 1.0, -3.0])
    assert_same_number(native.flatten([(2, values)], flat), 3.0)
    native.add_segments_(flat, [(5, values), (2, values)])
    assert_same(flat, torch.tensor([0, 0, *2 * values.double(), *values.double(), 0]))
    assert kernels.num_launches == 0


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
    kernels.run("flatten", flat.device, 1, (*arguments, np.uint64(largest.data_ptr())))
    assert_same(flat[:500], source.float())
    assert not flat[500:510].any() and (flat[510:] == -7).all()
    assert_same_number(largest, float(source.abs().max()))
    kernels.run("add_segments", flat.device, 1, arguments)
    assert_same(flat[:500], 2 * source.float())
    assert not flat[500:510].any() and (flat[510:] == -7).all()


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_nothing_is_accessed_beyond_the_end(kernels, source):
    """Place arrays before a page whose access would end the process."""
    for numel in range(1, 60):
        segment, flat = before_a_hole(numel, source), before_a_hole(numel + numel % 3, torch.float32)
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


def test_subnormal_numbers_are_no_zeros(gpu):
    tiny = torch.tensor([1e-40, -3e-41, 1e-45], device=gpu)
    shard = tiny.clone()
    native.add_segments_(shard, [(0, tiny), (0, tiny.double())])
    assert_same(shard, (tiny.cpu() + tiny.cpu()) + tiny.cpu())
    flat = torch.empty(3, device=gpu)
    assert_same_number(native.flatten([(0, tiny.double())], flat), float(tiny[0]))
    assert_same(flat, tiny.cpu())


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_launch_takes_its_turn_on_torch_s_stream(gpu, source):
    """Behind what was given to that stream before, and before what comes after; memory goes back in between."""
    stream = torch.cuda.Stream(gpu)
    wide, flat = torch.zeros(1000, 2000, dtype=source, device=gpu), torch.empty(2_000_000, device=gpu)
    shard = torch.zeros(2_000_000, device=gpu)
    torch.cuda.synchronize(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        wide.fill_(3.0)
        largest = native.flatten([(0, wide.t())], flat)  # a copy is made of it, and is gone when this returns
        torch.full_like(wide, 9.0)
        native.add_segments_(shard, [(0, flat), (0, wide.view(-1))])
        wide.fill_(9.0)
        flat = flat.clone()
    assert not stream.query(), "the host waited for the device"
    stream.synchronize()
    assert (flat == 3).all() and (shard == 6).all()
    assert_same_number(largest, 3.0)
