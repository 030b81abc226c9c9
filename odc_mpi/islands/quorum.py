"""Decisions on which islands a merge contains, the same on all of them, however late one is.

Any island may decide, as soon as it knows enough: it makes the symbolic link `merge-N`, whose target lists the islands,
in a directory that all of them see. A file system makes a link only once, so the first decision counts, and everyone
reads it. This needs no answer from another island, unlike an agreement by messages, and an island that was stopped at
any point finds the decision when it continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odc_mpi.errors import UserError


@dataclass(frozen=True)
class Quorum:
    """Rule for merges that do not wait for all islands.

    Attributes:
        size: Minimum number of islands in a merge.
        grace_s: Time in seconds for which a merge waits for further islands once it has that many.
        directory: Directory on a file system that all ranks share. The caller creates it, empty, for each start.
    """

    size: int
    grace_s: float
    directory: Path

    def decide(self, merge: int, islands: Sequence[int]) -> list[int]:
        """Decide which islands a merge contains, unless that has been decided, and return the decision.

        Raises `UserError` if the file system has no symbolic links.
        """
        path = self._path(merge)
        try:
            path.symlink_to(",".join(map(str, islands)))
        except FileExistsError:
            pass
        except OSError as error:
            raise UserError(
                f"islands.quorum: expected a directory for symbolic links, got {path.parent}: {error.strerror}: choose "
                "another run.dir, or set islands.quorum to 0"
            ) from error
        return self.read(merge)

    def read(self, merge: int) -> list[int]:
        """Return the islands of a merge that has been decided, in ascending order. Raises `OSError` otherwise."""
        return [int(island) for island in str(self._path(merge).readlink()).split(",")]

    def _path(self, merge: int) -> Path:
        return self.directory / f"merge-{merge}"


def mutual(have: np.ndarray, island: int) -> list[int]:
    """Return islands, among them `island`, that have received the differences of each other, in ascending order.

    `have[i, j]`, bool `[islands, islands]`, is True if island i has the difference of island j. Islands that many have
    received come first, so the result is large, but not always the largest one. It is empty if `island` has not shown
    its own difference.
    """
    both = have & have.T
    members = [island] if both[island, island] else []
    for other in np.argsort(-both.sum(axis=0), kind="stable").tolist():
        if members and other != island and both[other, [*members, other]].all():
            members.append(other)
    return sorted(members)
