"""Digest of the state of a model and its optimizer that are distributed over ranks."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.manifest import TensorRecord, blocks, compute_digest
from odc_mpi.checkpoint.shard_file import stored_type
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.runtime.world import World


def state_digest(world: World, state: TrainingState) -> str:
    """Return the digest that `odc-mpi checkpoint digest` would print for a checkpoint of this state. Collective.

    Rank 0 receives all elements, one block at a time, and sends the digest to all ranks.
    """
    # All ranks visit the tensors in the same order; rank 0 alone has all blocks, so its digest is the right one.
    digest = compute_digest(state.make_manifest(0, {}), partial(_send_blocks, world, state.local_ranges()))
    return world.gather_objects(digest)[0]


def _send_blocks(
    world: World, parts: Mapping[str, tuple[int, npt.NDArray]], name: str, record: TensorRecord
) -> Iterator[npt.NDArray]:
    """Yield blocks of a tensor. Rank 0 yields all blocks; the other ranks send their own to it and yield those."""
    description = "sending parameters to rank 0 for their digest"
    for rank, first, last in record.ranges:
        for start, stop in blocks(first, last):
            if rank == world.rank:
                begin, local = parts[name]
                block = local[start - begin : stop - begin]
                if rank:
                    world.wait(world.comm.Isend(block.view(np.uint8), dest=0), description)
                yield block
            elif not world.rank:
                block = np.empty(stop - start, dtype=stored_type(record.dtype))
                world.wait(world.comm.Irecv(block.view(np.uint8), source=rank), description)
                yield block
