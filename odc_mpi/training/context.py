"""`RunContext`: what the parts of a run share while it is set up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.data.loader import WHOLE, Part
from odc_mpi.models.frozen_prefix import FrozenPrefix
from odc_mpi.probe.decision import Decision
from odc_mpi.runtime.start.start_times import StartTimes
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.rundir.resume import ResumePoint
from odc_mpi.training.settings import Config
from odc_mpi.training.stop import StopRequest

if TYPE_CHECKING:
    from odc_mpi.training.loop import Trainer


@dataclass
class RunContext:
    """State that the parts of a run share while it is set up. Islands that train apart have one each.

    Attributes:
        config: Settings, of which more are resolved as the setup proceeds.
        world: Ranks of the run.
        stop: Request to stop, which handles signals.
        start_times: Durations of start-up phases.
        notes: Remarks to print on settings, keyed by setting, and the start-up line "islands".
        check_stop: Function that raises an error on all ranks if a stop was requested. Collective.
        islands: Islands that share one model (hybrid sharding), or None.
        part: Part of each minibatch and of the held-out data on which the run works.
        prints: True if rank 0 prints the start-up lines and the progress.
        add_callbacks: Function that adds callbacks to the trainer before its state is restored. Collective.
        resume_point: Checkpoint from which the run starts, or None.
        prefix: Frozen layers that are computed once per sequence, or None. Set during the setup.
        inputs, decision: Data and model, and how the ranks communicate. Set during the setup.
        model, optimizer: Sharded model that is trained, and its optimizer. Set during the setup.
    """

    config: Config
    world: World
    stop: StopRequest = field(default_factory=StopRequest)
    start_times: StartTimes = field(default_factory=lambda: StartTimes(perf_counter()))
    notes: Mapping[str, str] = field(default_factory=dict)
    check_stop: Callable[[], None] = lambda: None
    islands: Islands | None = None
    part: Part = WHOLE
    prints: bool = True
    add_callbacks: "Callable[[Trainer], None]" = lambda trainer: None
    resume_point: ResumePoint | None = None
    prefix: FrozenPrefix | None = None
    inputs: Inputs = None  # type: ignore[assignment]
    decision: Decision = None  # type: ignore[assignment]
    model: ShardedModel = None  # type: ignore[assignment]
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
