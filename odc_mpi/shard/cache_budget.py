"""Memory for traffic: what a rank keeps instead of fetching it again, or of sending it at once. Pure policy.

    parameters   fetched units that stay until the end of the minibatch
    gradients    sums of a unit's gradients at home, pushed once before A

Both are a rank's own affair: fetches and pushes are one-sided, so no other rank need know or agree.

Note: which units stay
    Beyond the root and two units in use, the units that come first stay, as long as they fit the budget, and nothing
    that stays is thrown out for another. Units are used in the order 1..L, L..1, 1..L: there the set makes as few
    fetches as any choice with as much memory could (Belady: the unit that is needed last goes), as would throwing out
    the longest unused. Where there is no backward, 1..L, 1..L, as in evaluation and generation, the longest unused is
    the very unit that comes next, and the set still saves all fetches of what it holds. For gradients each set of as
    many bytes saves the same.

Note: auto
    What is free at the start, less what the optimizer still takes, is shared out evenly among the ranks that share the
    memory; half of a rank's part is left to activations. Parameters come first, up to the units of the model, then
    gradients, up to those that are trained.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from odc_mpi.comm.transport import Access, Transport
from odc_mpi.errors import UserError
from odc_mpi.shard.units.unit import Unit

#: Of what is free for a rank, what the caches leave to activations.
ACTIVATION_SHARE = 0.5


class CacheBudget:
    """A budget in bytes, and what stays within it.

    Args:
        budget_bytes: 0: nothing stays.

    Attributes:
        budget_bytes: As given; a smaller one holds for what comes.
        admitted_bytes: Of all that stays now.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.admitted_bytes = 0
        self._admitted: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._admitted

    def fits(self, num_bytes: int) -> bool:
        """Return whether so much more could stay."""
        return self.admitted_bytes + num_bytes <= self.budget_bytes

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Let something stay if it fits; return whether it stays."""
        if key not in self._admitted and self.fits(num_bytes):
            self._admitted[key] = num_bytes
            self.admitted_bytes += num_bytes
        return key in self._admitted

    def discard(self, key: Hashable) -> None:
        """Take note that something is gone, if it stayed."""
        self.admitted_bytes -= self._admitted.pop(key, 0)


@dataclass(frozen=True)
class CacheBytes:
    """What a rank may spend, in bytes."""

    parameters: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class CacheNeeds:
    """What a model's caches could take.

    Attributes:
        maximum: All units but the root, all gradients: more is of no use. 0 where nothing is to be gained: fetches move no
            bytes, pushes go nowhere, or all ranks have to make the same ones.
        minimum: With less, no unit stays, or no gradient is added up.
    """

    maximum: CacheBytes
    minimum: CacheBytes

    @classmethod
    def measure(cls, units: Sequence[Unit], transport: Transport) -> "CacheNeeds":
        """Return the needs of a model with these units."""
        parameters, gradients = transport.parameters, transport.gradients
        kept = [
            sum(
                layout.numel * parameters.dtype_of(i).itemsize
                for i, layout in zip(unit.indices, unit.layouts, strict=True)
            )
            for unit in units
            if not unit.is_root
        ]
        trained = [layout for unit in units for layout in unit.layouts if layout.trainable]
        sums = [layout.numel * gradients.dtype.itemsize for layout in trained]
        kept = kept if parameters.access is Access.COPY and transport.one_sided else []
        sums = sums if gradients.pushes_to_peers and transport.one_sided else []
        return cls(CacheBytes(sum(kept), sum(sums)), CacheBytes(min(kept, default=0), min(sums, default=0)))

    def require_whole_model(self, granted: CacheBytes) -> None:
        """Refuse a budget that does not hold all units.

        Raises:
            UserError: It does not.
        """
        wanted, given = self.maximum.parameters, granted.parameters
        if given < wanted:
            raise UserError(
                f"comm.parameter_cache_bytes: expected at least {wanted}, so that the whole model stays on this "
                f"rank, got {given}, which is {wanted - given} bytes short"
            )


def auto_cache_bytes(
    free_bytes: int,
    num_ranks: int,
    needs: CacheBytes,
    parameters: int | Literal["auto"] = "auto",
    gradients: int | Literal["auto"] = "auto",
) -> CacheBytes:
    """Share out free memory by the rule of the note "auto".

    Args:
        free_bytes: Free for all ranks that share the memory, after the optimizer has taken its part.
        num_ranks: That share it.
        needs: What the caches could take at most.
        parameters: A budget that is settled already, or auto.
        gradients: As `parameters`, of gradients.

    Returns:
        Budgets that are settled as they are, the others by the rule.
    """
    share = int(max(0, free_bytes) * (1 - ACTIVATION_SHARE)) // num_ranks
    settled = 0 if isinstance(gradients, str) else gradients
    first = min(needs.parameters, max(0, share - settled)) if isinstance(parameters, str) else parameters
    second = min(needs.gradients, max(0, share - first)) if isinstance(gradients, str) else gradients
    return CacheBytes(first, second)
