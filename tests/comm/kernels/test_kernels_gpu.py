"""The kernels on a GPU beside torch's operators there: `make test-gpu`; else skipped, unless ODC_MPI_REQUIRE_GPU=1."""

import os

import numpy as np
import pytest
import torch
from kernel_cases import (
    DTYPES,
    TARGETS,
    assert_add_segments_as_torch,
    assert_casts,
    assert_flatten_as_torch,
    assert_same,
    assert_same_number,
)

from odc_mpi.comm.kernels import native

SPECIAL = pytest.mark.parametrize("special", [0.0, 0.1])


@pytest.fixture(scope="module", autouse=True)
def gpu():
    required = os.environ.get("ODC_MPI_REQUIRE_GPU") == "1"
    if not torch.cuda.is_available():
        (pytest.fail if required else pytest.skip)(f"torch {torch.__version__} sees no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = native.kernels_unavailable_reason(device)
    if reason is not None:
        (pytest.fail if required else pytest.skip)(f"no kernels: {reason}")
    for dtype in TARGETS:  # builds them
        flat = torch.empty(1, dtype=dtype, device=device)
        native.flatten([(0, flat.clone())], flat)
        native.add_segments_(flat, [(0, flat.clone())])
    return device


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@SPECIAL
def test_flatten_is_torch_s_to_the_bit(gpu, dtype, special):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        longest = int(rng.choice([40, 5000, 60_000]))
        assert_flatten_as_torch(rng, dtype, int(rng.integers(1, 300)), longest, special, gpu)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@SPECIAL
def test_add_segments_is_torch_s_to_the_bit(gpu, dtype, special):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        numel = int(rng.choice([1, 7, 4096, 500_001]))
        assert_add_segments_as_torch(rng, dtype, numel, int(rng.integers(0, 9)), special, gpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_value_of_two_bytes_is_cast_right(gpu, dtype, target):
    assert_casts(dtype, target, gpu)


def test_subnormal_numbers_are_no_zeros(gpu):
    tiny = torch.tensor([1e-40, -3e-41, 1e-45], device=gpu)
    shard = tiny.clone()
    native.add_segments_(shard, [(0, tiny), (0, tiny.double())])
    assert_same(shard, (tiny.cpu() + tiny.cpu()) + tiny.cpu())
    for dtype in TARGETS:
        flat = torch.empty(3, dtype=dtype, device=gpu)
        assert_same_number(native.flatten([(0, tiny.double())], flat), float(tiny[0]))
        assert_same(flat, tiny.cpu().to(dtype))


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
    assert not stream.query(), "somebody waited for the device"
    stream.synchronize()
    assert (flat == 3).all() and (shard == 6).all()
    assert_same_number(largest, 3.0)
