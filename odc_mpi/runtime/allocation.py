"""Where a run runs: its hosts, the ranks of each, and the job of Slurm's that it is. Local."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: Hosts that a line names; the rest is counted.
_MAX_NAMED = 4


def slurm_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what Slurm calls this job, nothing outside of one. Local.

    Returns:
        ``slurm_job_id`` as its commands take it, and ``slurm_restarts``, how often it was put into the queue again.
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
    return {"slurm_job_id": name, "slurm_restarts": int(environment.get("SLURM_RESTART_COUNT") or 0)}


def describe(layout: Sequence[tuple[str, int]], job: Mapping[str, Any]) -> str:
    """Say in a line where a run runs, such as "on node0 (4 ranks), node1 (4 ranks); Slurm job 12". Local.

    Args:
        layout: Of each node the host's name and how many ranks it has.
        job: What `slurm_job` returned.
    """
    named = [f"{host} ({count} {'rank' if count == 1 else 'ranks'})" for host, count in layout[:_MAX_NAMED]]
    more = len(layout) - len(named)
    if more:
        named.append(f"and {more} more with {sum(count for _, count in layout[_MAX_NAMED:])} ranks")
    line = f"on {', '.join(named)}"
    if job:
        line += f"; Slurm job {job['slurm_job_id']}"
        line += f", start {job['slurm_restarts'] + 1}" if job["slurm_restarts"] else ""
    return line
