from collections.abc import Callable
from typing import Any

import pytest
import rank_threads
import torch
from local_transport import LocalGroup, LocalTransport

from odc_mpi.comm.transport import PARAMETER_DTYPES, REDUCE_DTYPES

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def run(size: int, work: Callable[[LocalTransport], Any], **dtypes: torch.dtype) -> list[Any]:
    return rank_threads.run(size, lambda *rank: LocalTransport(*rank, **dtypes), work)


@SIZES
@pytest.mark.parametrize("param_dtype", PARAMETER_DTYPES)
@pytest.mark.parametrize("reduce_dtype", REDUCE_DTYPES)
def test_shards_begin_as_zeros_of_the_right_kind(
    size: int, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    def work(transport: LocalTransport) -> None:
        for i, layout in enumerate(transport.parameters.layouts):
            for shard, dtype in (
                (transport.parameters.shard(i), param_dtype),
                (transport.gradients.shard(i), reduce_dtype),
            ):
                assert shard.shape == (layout.shard_numel,) and shard.dtype == dtype and not shard.any()
        numel = sum(layout.shard_numel for layout in transport.parameters.layouts)
        assert transport.parameters.shard_bytes == numel * param_dtype.itemsize

    run(size, work, param_dtype=param_dtype, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_a_param_dtype_that_cannot_travel(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"param_dtype must be one of .*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, param_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_a_reduce_dtype_that_mpi_cannot_add(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"reduce_dtype must be one of .*what MPI can add.*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, reduce_dtype=dtype)
