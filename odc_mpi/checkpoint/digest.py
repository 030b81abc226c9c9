"""A SHA-256 over the state of a training run that does not depend on the number of ranks.

It covers names, types, shapes and bits of parameters, buffers and the optimizer's state, but not the configuration, the
position in the data, or versions.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy.typing as npt

from odc_mpi.checkpoint.manifest import Manifest, TensorRecord

#: Maximum number of elements that are read at a time.
BLOCK_NUMEL = 1 << 22

#: Function of a tensor's path and record. Yields its elements in order, in the stored type.
Read = Callable[[str, TensorRecord], Iterable[npt.NDArray]]


def compute_digest(manifest: Manifest, read: Read) -> str:
    """Return the digest of the tensors and scalars of a manifest, as 64 hexadecimal digits."""
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
    """Split a range of elements into blocks; yield the start and stop of each."""
    for first in range(start, stop, BLOCK_NUMEL):
        yield first, min(first + BLOCK_NUMEL, stop)
