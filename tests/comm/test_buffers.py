import pytest
import torch

from odc_mpi.comm.buffers import BufferPool


def address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_a_buffer_is_flat_and_of_the_size_asked_for(dtype: torch.dtype, numel: int) -> None:
    pool = BufferPool()
    buffer = pool.acquire(numel, dtype)
    assert buffer.shape == (numel,) and buffer.dtype == dtype and buffer.is_contiguous()
    assert buffer.storage_offset() == 0 and buffer._base is None
    buffer.fill_(1)
    assert pool.peak_bytes == max(1, numel) * dtype.itemsize


def test_the_smallest_that_fits_is_taken() -> None:
    pool = BufferPool()
    buffers = {numel: pool.acquire(numel, torch.uint8) for numel in (400, 100, 200, 300)}
    addresses = {numel: address(buffer) for numel, buffer in buffers.items()}
    for buffer in buffers.values():
        pool.release(buffer)
    del buffers, buffer
    taken = [pool.acquire(150, torch.uint8), pool.acquire(75, torch.bfloat16), pool.acquire(350, torch.uint8)]
    assert [address(buffer) for buffer in taken] == [addresses[200], addresses[300], addresses[400]]
    assert pool.peak_bytes == 1000


@pytest.mark.parametrize(
    "look",
    [
        lambda buffer: buffer,
        lambda buffer: buffer[3:5],
        lambda buffer: buffer.detach(),
        lambda buffer: buffer.view(10, 10).t(),
        lambda buffer: torch.empty(0).set_(buffer.untyped_storage(), 2, (4,), (1,)),
        lambda buffer: buffer.numpy(),
    ],
    ids=["itself", "slice", "detached", "transposed", "set", "numpy"],
)
def test_a_referenced_buffer_is_not_reused(look) -> None:
    pool = BufferPool()
    buffer = pool.acquire(100, torch.float32)
    buffer.copy_(torch.arange(100.0))
    where = address(buffer)
    view = look(buffer)
    before = torch.as_tensor(view).clone()
    pool.release(buffer)
    del buffer
    others = [pool.acquire(100, torch.float32).fill_(-1) for _ in range(3)]
    assert where not in [address(other) for other in others]
    assert torch.equal(torch.as_tensor(view), before)
    del view
    assert address(pool.acquire(100, torch.float32)) == where


def test_a_buffer_too_small_is_freed() -> None:
    """Units of growing sizes do not each leave a buffer behind."""
    pool = BufferPool()
    for numel in range(1, 50):
        pool.release(pool.acquire(numel, torch.uint8))
    assert pool.peak_bytes == 49


def test_clear_frees_idle_buffers_only() -> None:
    pool = BufferPool()
    kept, idle = pool.acquire(100, torch.uint8).fill_(9), pool.acquire(50, torch.uint8)
    pool.release(idle)
    del idle
    pool.clear()
    assert pool._held_bytes == 100 and bool((kept == 9).all())
    pool.release(kept)
    pool.clear()
    assert pool._held_bytes == 0 and pool.peak_bytes == 150
    assert pool.acquire(10, torch.uint8).numel() == 10
