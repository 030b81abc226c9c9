"""Memory budgets for caches that reduce communication.

    parameters   fetched units stay unsharded until the minibatch ends, so they are not fetched again
    gradients    a unit's gradients are accumulated locally and pushed once, by the end of the minibatch

Ranks may have different budgets, because fetches and pushes are one-sided and do not affect other ranks. This module
neither communicates nor allocates memory.

A unit is admitted to the cache when it is first fetched, if it fits into the remaining budget, and is never evicted to
admit another unit. Training uses units 1..L and then L..1. For this order, no policy needs fewer fetches, and LRU needs
just as many. Evaluation and generation use units 1..L repeatedly, for which LRU would always evict the unit that is
needed next. docs/caching.md explains this policy and the automatic sizes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError, warn
from odc_mpi.shard.units.unit import Unit


class CacheBudget:
    """Set of cache keys, limited by a budget in bytes. Lowering `budget_bytes` does not evict admitted keys."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.admitted_bytes = 0
        self._admitted: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._admitted

    def fits(self, num_bytes: int) -> bool:
        """Return True if an entry of `num_bytes` fits into the remaining budget."""
        return self.admitted_bytes + num_bytes <= self.budget_bytes

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Admit `key` if its `num_bytes` fit into the remaining budget. Return True if the key is now admitted."""
        if key not in self._admitted and self.fits(num_bytes):
            self._admitted[key] = num_bytes
            self.admitted_bytes += num_bytes
        return key in self._admitted

    def discard(self, key: Hashable) -> None:
        """Remove a key and free its bytes in the budget. If the key is not admitted, nothing happens."""
        self.admitted_bytes -= self._admitted.pop(key, 0)


@dataclass(frozen=True)
class CacheBytes:
    """Sizes in bytes of a rank's caches for unsharded parameters and accumulated gradients."""

    parameters: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class CacheNeeds:
    """Range of sizes in which a model's caches are useful.

    Attributes:
        maximum: Sizes that suffice for all units except the root, and for all gradients. A size is 0 if the cache would
            save no communication because fetches return views or pushes stay on this rank.
        minimum: Sizes that suffice for the smallest of these units, and for the smallest gradient array. A smaller
            cache would stay empty.
    """

    maximum: CacheBytes
    minimum: CacheBytes

    @classmethod
    def measure(cls, units: Sequence[Unit], transport: Transport) -> "CacheNeeds":
        """Compute the cache needs of a model that consists of `units` (groups of parameters) and uses `transport`."""
        parameters, gradients = transport.parameters, transport.gradients
        array_bytes = []
        arrays = [zip(unit.indices, unit.layouts, strict=True) for unit in units if not unit.is_root]
        unit_bytes = [
            sum(layout.numel * parameters.dtype_of(i).itemsize for i, layout in each if parameters.uses_buffer(i))
            for each in arrays
        ]
        if not gradients.is_local:
            trainable = [layout for unit in units for layout in unit.layouts if layout.trainable]
            array_bytes = [layout.numel * gradients.dtype.itemsize for layout in trainable]
        smallest = CacheBytes(min(unit_bytes, default=0), min(array_bytes, default=0))
        return cls(CacheBytes(sum(unit_bytes), sum(array_bytes)), smallest)

    def require_full_model(self, granted: CacheBytes) -> None:
        """Raise UserError if `granted.parameters` is too small to hold all units except the root."""
        needed, available = self.maximum.parameters, granted.parameters
        if available < needed:
            raise UserError(
                f"comm.parameter_cache_bytes: expected at least {needed}, so that the whole model stays unsharded on "
                f"this rank, got {available}, which is {needed - available} bytes short"
            )


def node_cache_fits(num_bytes: int, free_bytes: int, num_ranks: int, comm: CommConfig) -> bool:
    """Return True if the parameter caches of a node's `num_ranks` ranks could together hold a model of `num_bytes`.

    For the other arguments, see `auto_cache_bytes`.
    """
    needs = CacheBytes(-(-num_bytes // num_ranks))
    return auto_cache_bytes(free_bytes, num_ranks, needs, comm).parameters >= needs.parameters


def auto_cache_bytes(free_bytes: int, num_ranks: int, needs: CacheBytes, comm: CommConfig) -> CacheBytes:
    """Return the sizes of a rank's caches. If both are "auto" in `comm`, that for parameters is computed first.

    Args:
        free_bytes: Free memory in bytes, minus optimizer states yet to be allocated. Half is left for activations.
        num_ranks: Number of ranks that share this memory equally.
        needs: Maximum useful sizes, which automatic sizes never exceed.
    """
    share = max(0, free_bytes) // 2 // num_ranks
    parameters, gradients = comm.parameter_cache_bytes, comm.gradient_cache_bytes
    reserved = 0 if isinstance(gradients, str) else gradients
    first = min(needs.parameters, max(0, share - reserved)) if isinstance(parameters, str) else parameters
    second = min(needs.gradients, max(0, share - first)) if isinstance(gradients, str) else gradients
    return CacheBytes(first, second)


def warn_about_budgets(requested: CacheBytes, needs: CacheNeeds) -> None:
    """Warn if a cache has a nonzero size that is too small for even the smallest unit or gradient array."""
    for kind, what, budget, minimum in (
        ("parameter", "unit", requested.parameters, needs.minimum.parameters),
        ("gradient", "gradient array", requested.gradients, needs.minimum.gradients),
    ):
        if 0 < budget < minimum:
            warn(
                f"WARNING: comm.{kind}_cache_bytes: expected 0 or at least {minimum}, the bytes of the smallest "
                f"{what}, got {budget}: nothing is cached"
            )
