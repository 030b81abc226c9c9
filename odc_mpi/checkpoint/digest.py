"""SHA-256 digest of the state of a training run, which does not depend on the number of ranks.

It covers names, types, shapes and bits of parameters, buffers and optimizer state. It does not cover the configuration,
the position in the data, or versions of software.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy.typing as npt

from odc_mpi.checkpoint.manifest import Manifest, TensorRecord

#: Maximum number of elements in a block, which is read at once.
BLOCK_NUMEL = 1 << 22

#: Function that yields the elements of a tensor as arrays, in order and in the stored type. Arguments: the path
#: and the record of the tensor.
Read = Callable[[str, TensorRecord], Iterable[npt.NDArray]]


def compute_digest(manifest: Manifest, read: Read) -> str:
    """Return the digest of the tensors and scalars of a manifest, as 64 hexadecimal digits. `read` reads a tensor."""
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
    """Split a range of elements into blocks of at most `BLOCK_NUMEL`, and yield the start and stop of each block."""
    for first in range(start, stop, BLOCK_NUMEL):
        yield first, min(first + BLOCK_NUMEL, stop)
