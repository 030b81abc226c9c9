"""Description of the hosts of a run, and of its Slurm job."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: Maximum number of hosts in a line; the others are counted.
_MAX_LISTED = 4


def slurm_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return ``slurm_job_id`` for Slurm commands and ``slurm_restarts``, the number of requeues; {} without Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return {}
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
    return {"slurm_job_id": name, "slurm_restarts": int(environment.get("SLURM_RESTART_COUNT") or 0)}


def describe_layout(layout: Sequence[tuple[str, int]], job: Mapping[str, Any]) -> str:
    """Format `World.layout` and a `slurm_job` as one line: "on node0 (4 ranks), node1 (4 ranks); Slurm job 12"."""
    named = [f"{host} ({count} {'rank' if count == 1 else 'ranks'})" for host, count in layout[:_MAX_LISTED]]
    more = len(layout) - len(named)
    if more:
        named.append(f"and {more} more with {sum(count for _, count in layout[_MAX_LISTED:])} ranks")
    line = f"on {', '.join(named)}"
    if job:
        line += f"; Slurm job {job['slurm_job_id']}"
        line += f", start {job['slurm_restarts'] + 1}" if job["slurm_restarts"] else ""
    return line
