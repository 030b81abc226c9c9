"""Memory budgets that reduce communication.

    parameters   fetched units stay unsharded until the minibatch ends, so they are not fetched again
    gradients    gradients of a unit are accumulated locally and pushed once, at the end of the minibatch

Each rank chooses its budgets by itself: fetches and pushes are one-sided, so other ranks are not affected. Does not
communicate and does not allocate.

A unit is admitted when it is first fetched, if it fits the remaining budget, and is never evicted for another. In
training (order 1..L, L..1) no other policy needs fewer fetches, and LRU needs as many. In evaluation and generation
(1..L, 1..L) LRU would evict exactly the next unit. docs/caching.md explains this, and the automatic sizes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from odc_mpi.comm.transport import Access, Transport
from odc_mpi.errors import UserError
from odc_mpi.shard.units.unit import Unit

#: Part of a rank's free memory that the automatic budgets leave to activations.
ACTIVATION_SHARE = 0.5


class CacheBudget:
    """A byte budget and the keys admitted to it. Lowering `budget_bytes` does not evict admitted keys."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.admitted_bytes = 0
        self._admitted: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._admitted

    def fits(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more fit the budget."""
        return self.admitted_bytes + num_bytes <= self.budget_bytes

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Admit a key if it fits. Return whether the key is admitted, now or before."""
        if key not in self._admitted and self.fits(num_bytes):
            self._admitted[key] = num_bytes
            self.admitted_bytes += num_bytes
        return key in self._admitted

    def discard(self, key: Hashable) -> None:
        """Remove a key, if it was admitted."""
        self.admitted_bytes -= self._admitted.pop(key, 0)


@dataclass(frozen=True)
class CacheBytes:
    """Sizes of the caches of a rank, in bytes."""

    parameters: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class CacheNeeds:
    """Useful sizes of the caches of a model.

    Attributes:
        maximum: Size of all units but the root, and of all gradients. 0 if a cache would save no communication: fetches
            copy nothing, pushes stay on this rank, or fetches and pushes are collective.
        minimum: Size of the smallest unit and of the smallest gradient array. A smaller cache has no effect.
    """

    maximum: CacheBytes
    minimum: CacheBytes

    @classmethod
    def measure(cls, units: Sequence[Unit], transport: Transport) -> "CacheNeeds":
        """Return the needs of a model with these units."""
        parameters, gradients = transport.parameters, transport.gradients
        unit_bytes, array_bytes = [], []
        if parameters.access is Access.COPY and transport.one_sided:
            arrays = [zip(unit.indices, unit.layouts, strict=True) for unit in units if not unit.is_root]
            unit_bytes = [sum(layout.numel * parameters.dtype_of(i).itemsize for i, layout in each) for each in arrays]
        if gradients.pushes_to_peers and transport.one_sided:
            trainable = [layout for unit in units for layout in unit.layouts if layout.trainable]
            array_bytes = [layout.numel * gradients.dtype.itemsize for layout in trainable]
        smallest = CacheBytes(min(unit_bytes, default=0), min(array_bytes, default=0))
        return cls(CacheBytes(sum(unit_bytes), sum(array_bytes)), smallest)

    def require_full_model(self, granted: CacheBytes) -> None:
        """Raise UserError if the granted parameter cache does not hold all units but the root."""
        needed, available = self.maximum.parameters, granted.parameters
        if available < needed:
            raise UserError(
                f"comm.parameter_cache_bytes: expected at least {needed}, so that the whole model stays unsharded on "
                f"this rank, got {available}, which is {needed - available} bytes short"
            )


def auto_cache_bytes(
    free_bytes: int,
    num_ranks: int,
    needs: CacheBytes,
    parameters: int | Literal["auto"] = "auto",
    gradients: int | Literal["auto"] = "auto",
) -> CacheBytes:
    """Compute the cache sizes that are "auto": parameters first, then gradients, each up to the useful size in `needs`.

    `free_bytes` is the free memory of `num_ranks` ranks together, without their future optimizer state.
    """
    share = int(max(0, free_bytes) * (1 - ACTIVATION_SHARE)) // num_ranks
    reserved = 0 if isinstance(gradients, str) else gradients
    first = min(needs.parameters, max(0, share - reserved)) if isinstance(parameters, str) else parameters
    second = min(needs.gradients, max(0, share - first)) if isinstance(gradients, str) else gradients
    return CacheBytes(first, second)
