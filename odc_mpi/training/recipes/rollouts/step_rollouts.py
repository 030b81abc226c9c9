"""Prompts of one training step: which ranks claim them, and where their finished groups are until they are trained."""

from collections.abc import Callable, Iterator, Sequence

from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.work_queue import QueueState, WorkQueue
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.prompt_group import PromptGroup
from odc_mpi.runtime.world import World


class RolloutWindows:
    """Windows for the prompts of one step at a time, with at most `num_prompts`. Construction is collective."""

    def __init__(self, world: World, num_prompts: int, store_bytes: int) -> None:
        self.world, self.tickets = world, Tickets(world)
        self.queue = WorkQueue(world, num_prompts, store_bytes)

    def reset(self) -> None:
        """Remove everything, between the points at which gradients are complete and parameters are published."""
        self.tickets.reset()
        self.queue.reset()


class StepRollouts:
    """Prompts of one step and their groups.

    Attributes:
        number: The step that trains them.
        num_decoding: Number of prompts that this rank has claimed and whose completions have not ended. The caller
            counts down.
        minibatch: The prompts. A position is an index in `minibatch.indices`.
        unpublished: Groups of this rank that do not fit in its store, and that it trains itself.
        metrics_to_add: Functions to call when the step begins, which add values to its metrics.
    """

    def __init__(
        self, number: int, minibatch: PlannedMinibatch, claim_order: Sequence[int], windows: RolloutWindows
    ) -> None:
        self.number, self.minibatch = number, minibatch
        self.unpublished: list[PromptGroup] = []
        self.metrics_to_add: list[Callable[[], None]] = []
        self._claim_order, self._windows = claim_order, windows
        self._draw: Iterator[int] | None = windows.tickets.draw(len(claim_order))
        self.num_decoding = 0

    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self._claim_order)

    @property
    def has_prompts(self) -> bool:
        """False if this rank has found that there are no more prompts to claim."""
        return self._draw is not None

    @property
    def is_decoded_here(self) -> bool:
        """True if this rank can claim no more prompts, and has decoded those that it claimed."""
        return self._draw is None and not self.num_decoding

    def claim_prompts(self, count: int) -> list[int]:
        """Claim up to `count` prompts of this step, and return their positions. One-sided.

        Returns fewer if no more are left (then `has_prompts` is False), or if this rank would decode more than an even
        share of the step's prompts at the same time.
        """
        positions: list[int] = []
        share = -(-self.count // self._windows.world.size)
        while self._draw and len(positions) < min(count, share - self.num_decoding):
            if (ticket := next(self._draw, None)) is None:
                self._draw = None
            else:
                positions.append(self._claim_order[ticket])
        for position in positions:
            self._windows.queue.mark_started(position)
        self.num_decoding += len(positions)
        return positions

    def finish(self, position: int, group: PromptGroup | None) -> bool:
        """Publish a group, or mark it done if it is None or does not fit. Return True if it fits. One-sided."""
        fits = group is None or self._windows.queue.publish(position, group.to_bytes())
        if group is None or not fits:
            self._windows.queue.mark_done(position)
        if group is not None and not fits:
            self.unpublished.append(group)
        return fits

    def take_unpublished(self) -> list[PromptGroup]:
        """Return the groups that this rank trains itself, and forget them."""
        groups, self.unpublished = self.unpublished, []
        return groups

    def snapshot(self) -> QueueState:
        """Return the state of all groups. One-sided."""
        return self._windows.queue.snapshot(self.count)

    def has_changed(self, state: QueueState) -> bool:
        """Return True if the state of a group has changed since `state`. One-sided."""
        return self._windows.queue.has_changed(state)

    def claim_groups(self, state: QueueState) -> Iterator[tuple[int, PromptGroup]]:
        """Claim published groups. Yields each with the rank that generated it. One-sided."""
        for _, owner, content in self._windows.queue.claim(state.published):
            yield owner, PromptGroup.from_bytes(content)
