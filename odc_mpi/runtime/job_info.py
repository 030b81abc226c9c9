"""Descriptions of the hosts and the Slurm job of a run."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: Maximum number of hosts named in a line. Any further hosts are only counted.
_MAX_LISTED = 4


def slurm_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the ID and the requeue count of this process's Slurm job, or an empty dictionary outside a Slurm job.

    The keys are "slurm_job_id", whose value has the format that Slurm commands expect, and "slurm_restarts".
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
    return {"slurm_job_id": name, "slurm_restarts": int(environment.get("SLURM_RESTART_COUNT") or 0)}


def describe_layout(layout: Sequence[tuple[str, int]], job: Mapping[str, Any]) -> str:
    """Describe `World.layout` and the result of `slurm_job` in one line, such as "on node0 (4 ranks); Slurm job 12"."""
    hosts = [f"{host} ({count} {'rank' if count == 1 else 'ranks'})" for host, count in layout[:_MAX_LISTED]]
    more = len(layout) - len(hosts)
    if more:
        hosts.append(f"and {more} more with {sum(count for _, count in layout[_MAX_LISTED:])} ranks")
    line = f"on {', '.join(hosts)}"
    if job:
        line += f"; Slurm job {job['slurm_job_id']}"
        line += f", start {job['slurm_restarts'] + 1}" if job["slurm_restarts"] else ""
    return line
