"""Division of a world's ranks into islands of equal size, for example one per node.

    island 0   rank 0   rank 1   rank 2
    island 1   rank 3   rank 4   rank 5
                  |        |        |
               column   column   column

The ranks in an island divide all parameters and gradients among themselves, so all ranks in a column store the same
part. If the islands share one model, each of them updates an equal share of this part for all islands. If the islands
train apart (`DiLoCo`), each updates the part of its own island's model.
"""

from collections.abc import Mapping

from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text
from odc_mpi.runtime.world import World


class Islands:
    """Division of a world into islands. Construction is collective.

    A model that is sharded with `shard_model(..., islands=islands)` needs its own `Islands` object and closes it.

    Args:
        world: World to divide. Closing it also closes the worlds of the island and the column.
        by: Number of ranks per island, "node" for one island per node, or "off" for a single island.

    Raises:
        AllRanksUserError: The world cannot be divided into islands of equal size with consecutive ranks.

    Attributes:
        size: Number of islands, not of ranks in an island.
        index: Index of this rank's island.
        island: World of the ranks in this rank's island.
        column: World of the ranks that have the same rank within their island as this rank, ordered by island.
        column_ranks: Ranks in `world` that form the column.
    """

    def __init__(self, world: World, by: str | int) -> None:
        num_ranks = world.run_on_all(lambda: _ranks_per_island(world, by))
        self.is_closed = False
        self.size = world.size // num_ranks
        self.index, local_rank = divmod(world.rank, num_ranks)
        self.island = world.split(self.index)
        self.column = world.split(local_rank)
        self.column_ranks = [island * num_ranks + local_rank for island in range(self.size)]
        self._world = world
        world.set_locations([f"{host} (island {rank // num_ranks})" for rank, host in enumerate(world.hosts)])

    def close(self) -> None:
        """Close the worlds of the island and the column. Collective. Idempotent."""
        self.is_closed = True
        self._world.set_locations(self._world.hosts)
        self.column.close()
        self.island.close()


def ranks_per_island(by: str | int, ranks_per_node: Mapping[str, int]) -> int:
    """Return the number of ranks per island, given the setting `islands.by` and the number of ranks on each node.

    With "off", this is the total number of ranks. Raises `UserError` if `by` is invalid or would give unequal islands.
    """
    num_ranks = sum(ranks_per_node.values())
    if by == "off":
        return num_ranks
    if by != "node":
        if not isinstance(by, int) or by < 1 or num_ranks % by:
            raise UserError(f"islands.by: expected node or a divisor of {num_ranks}, the number of ranks, got {by}")
        return by
    if len(set(ranks_per_node.values())) > 1:
        nodes = ", ".join(f"{node}: {count}" for node, count in ranks_per_node.items())
        raise UserError(
            "islands.by: expected the same number of ranks on each node, as node requires, got "
            f"{truncate_text(nodes, 80)}: set a number of ranks"
        )
    return next(iter(ranks_per_node.values()))


def _ranks_per_island(world: World, by: str | int) -> int:
    num_ranks = ranks_per_island(by, {f"{host} ({node})": count for node, (host, count) in enumerate(world.layout)})
    if by == "node" and world.node_ranks[-1] - world.node_ranks[0] >= num_ranks:
        raise UserError(
            f"islands.by: expected consecutive ranks on each node, as node requires, got {world.node_ranks[:8]} on "
            f"{world.hosts[world.rank]}: start the ranks node by node (srun --distribution=block, mpirun --map-by slot)"
        )
    return num_ranks
