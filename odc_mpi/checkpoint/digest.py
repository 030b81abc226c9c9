"""One SHA-256 over the state of a training, whatever the number of ranks that hold it. No communication.

Parameters, buffers and the optimizer's state go into it by name, type, shape and bits. Configuration, place in the data
and versions do not.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy.typing as npt

from odc_mpi.checkpoint.manifest import Manifest, TensorRecord

#: Elements of a tensor that are read at a time.
BLOCK_NUMEL = 1 << 22

#: Yields the elements of a tensor in order, in the stored type, given its path and its record.
Read = Callable[[str, TensorRecord], Iterable[npt.NDArray]]


def compute_digest(manifest: Manifest, read: Read) -> str:
    """Return the digest of what a manifest describes, as 64 hexadecimal digits. Local, but for what `read` does."""
    digest = hashlib.sha256()
    for name, record in sorted(manifest.tensors.items()):
        digest.update(f"{name} {record.dtype} {list(record.shape)}\n".encode())
        for block in read(name, record):
            digest.update(block.tobytes())
    for name, values in sorted(manifest.scalars.items()):
        for parameter, value in sorted(values.items()):
            digest.update(f"{name} {parameter} {float(value).hex()}\n".encode())
    return digest.hexdigest()


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a range of elements into blocks: yield the first element of each, and one past its last."""
    for first in range(start, stop, BLOCK_NUMEL):
        yield first, min(first + BLOCK_NUMEL, stop)
