"""Division of a world's ranks into islands of equal size, for example one per node.

    island 0   rank 0   rank 1   rank 2
    island 1   rank 3   rank 4   rank 5
                  |        |        |
               column   column   column

The ranks in an island divide all parameters, and the sums of the island's gradients, among themselves. All ranks in a
column store the same part. Each of them owns an equal share of this part, which it updates for all islands.
"""

from odc_mpi.errors import UserError
from odc_mpi.runtime.world import World


class Islands:
    """Division of a world into islands. Construction is collective.

    Args:
        world: World to divide. The worlds of the island and the column close when it closes.
        by: Number of ranks per island, or "node" for one island per node.

    Raises:
        AllRanksUserError: The world cannot be divided into islands of equal size with consecutive ranks.

    Attributes:
        size: Number of islands.
        index: Index of this rank's island.
        island: World of the ranks in this rank's island.
        column: World of the ranks that have the same rank in their islands as this rank, in the order of the islands.
        column_ranks: Ranks in `world` that form the column.
    """

    def __init__(self, world: World, by: str | int) -> None:
        num_ranks = world.run_on_all(lambda: _num_ranks(world, by))
        self.size = world.size // num_ranks
        self.index, local_rank = divmod(world.rank, num_ranks)
        self.island = world.split(self.index)
        self.column = world.split(local_rank)
        self.column_ranks = [island * num_ranks + local_rank for island in range(self.size)]

    def __str__(self) -> str:
        ranks = "1 rank" if self.island.size == 1 else f"{self.island.size} ranks"
        return f"{self.size} of {ranks}"


def _num_ranks(world: World, by: str | int) -> int:
    """Return the number of ranks per island."""
    if by != "node":
        if not isinstance(by, int) or by < 1 or world.size % by:
            raise UserError(f"islands.by: expected node or a divisor of the number of ranks, {world.size}, got {by}")
        return by
    sizes = [num_ranks for _, num_ranks in world.layout]
    if len(set(sizes)) > 1:
        nodes = ", ".join(f"{host}: {num_ranks}" for host, num_ranks in world.layout[:8])
        raise UserError(f"islands.by: node expects the same number of ranks on each node, got {nodes}: set a number")
    if world.node_ranks[-1] - world.node_ranks[0] >= sizes[0]:
        raise UserError(
            f"islands.by: node expects consecutive ranks on each node, got {world.node_ranks[:8]} on "
            f"{world.hosts[world.rank]}: start the ranks node by node (srun --distribution=block)"
        )
    return sizes[0]
