"""Digest of the parameters of a run, equal to the digest of a checkpoint of them."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.digest import blocks, compute_digest
from odc_mpi.checkpoint.manifest import TensorRecord
from odc_mpi.checkpoint.shard_file import stored_type
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.runtime.world import World


def parameters_digest(state: TrainingState, world: World) -> str:
    """Compute the digest that `odc-mpi checkpoint digest` prints for a checkpoint of this state. Collective.

    All elements are sent to rank 0, a block at a time; all ranks return the digest.
    """
    manifest, parts, description = state.describe(0, {}), state.parts(), "sending parameters to rank 0 for their digest"

    def read(name: str, record: TensorRecord) -> Iterator[npt.NDArray]:
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

    # All ranks visit the tensors in the same order; rank 0 alone has all blocks, so its digest is the right one.
    return world.gather_objects(compute_digest(manifest, read))[0]
