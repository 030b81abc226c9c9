import pytest
import torch
from ranks import LocalGroup, LocalTransport


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_a_param_dtype_that_cannot_travel(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"param_dtype must be one of .*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, param_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_a_reduce_dtype_that_mpi_cannot_add(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"reduce_dtype must be one of .*what MPI can add.*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, reduce_dtype=dtype)
