"""`odc-mpi bench schedule`: schedules on the real runtime beside the simulator's, for people or as one JSON object."""

import json
import os

from odc_mpi.bench.measure import speaker
from odc_mpi.bench.schedule import measure
from odc_mpi.errors import AgreedError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import simulate
from odc_mpi.simulate.text import report


def run(world: World, scenario: Scenario, step_s: float, as_json: bool) -> None:
    """Measure a scenario; rank 0 prints what came of it. Collective.

    Args:
        world: The ranks.
        scenario: What is tried.
        step_s: See `schedule.measure`.
        as_json: Print one object: the figures of `Outcome`, `simulated`, and what they were measured on.

    Raises:
        AgreedError: There are several nodes; on every rank.
    """
    if world.num_nodes > 1:
        raise AgreedError(
            f"bench schedule measures on one node, got {world.num_nodes}: ranks that sleep serve no other node's, "
            "odc-mpi simulate reckons for any"
        )

    before = os.getloadavg()[0]
    outcome = measure(world, scenario, step_s, speaker(world.rank))
    if world.rank:
        return
    simulated = simulate(scenario)
    if as_json:
        stack = {
            "benchmark": "schedule",
            "library": world.mpi_library,
            "nodes": world.num_nodes,
            "slept_step_s": step_s,
            "load_average": [before, os.getloadavg()[0]],
        }
        print(json.dumps({**stack, **outcome.as_json(), "simulated": simulated.speedup}), flush=True)
    else:
        print(f"{world.mpi_library}\n{report(outcome, {'simulated': simulated.speedup})}", flush=True)
