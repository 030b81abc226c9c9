"""The hosts of a run, the ranks on each, and its Slurm job."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: The most hosts that a line names; others are counted.
_MAX_LISTED = 4


def slurm_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the number and the restarts of this Slurm job; nothing outside of Slurm.

    Returns:
        ``slurm_job_id`` as its commands take it, and ``slurm_restarts``, how often it was put into the queue again.
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
    return {"slurm_job_id": name, "slurm_restarts": int(environment.get("SLURM_RESTART_COUNT") or 0)}


def describe_layout(layout: Sequence[tuple[str, int]], job: Mapping[str, Any]) -> str:
    """Name the hosts of a run in a line, such as "on node0 (4 ranks), node1 (4 ranks); Slurm job 12".

    Args:
        layout: Host name and number of ranks of each node.
        job: What `slurm_job` returned.
    """
    named = [f"{host} ({count} {'rank' if count == 1 else 'ranks'})" for host, count in layout[:_MAX_LISTED]]
    more = len(layout) - len(named)
    if more:
        named.append(f"and {more} more with {sum(count for _, count in layout[_MAX_LISTED:])} ranks")
    line = f"on {', '.join(named)}"
    if job:
        line += f"; Slurm job {job['slurm_job_id']}"
        line += f", start {job['slurm_restarts'] + 1}" if job["slurm_restarts"] else ""
    return line
