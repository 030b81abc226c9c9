"""`odc-mpi bench gpu`: measured by a process beside this one, so that what is known survives what ends it.

Windows on GPUs may crash a process or never answer. As for the doctor, this one does not start MPI: a child takes its
part in the job and tells what it finds as it goes. Communication: that of `bench.gpu.benchmark`, in the children.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from odc_mpi.bench.measure import parse_sizes, show, speaker
from odc_mpi.errors import UserError
from odc_mpi.runtime.ranks import say
from odc_mpi.runtime.start.launch import Ending, launched_rank, take_part
from odc_mpi.stack.gpu import has_gpu

#: What can be measured alone.
PARTS = ("bandwidths", "kernels", "step")
#: The process that takes part in MPI; the options, as JSON, and a file descriptor follow.
CHILD = (sys.executable, "-m", "odc_mpi.bench.gpu.child")
#: The child ends so long before all does, at most half of that, to have told what it knows.
MARGIN_S = 15.0
#: Seconds between two of its news: a model of a billion parameters is drawn in less, for each contender.
QUIET_S = 300.0
_AS_GIVEN = ("repeats", "steps", "window_device", "ranks", "timeout_s", "parts")
#: What part of `left_out` tells how windows on GPUs ended the measurement.
ENDED = "device_windows"


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `bench.gpu.benchmark.Options` as JSON takes them. Local.

    Raises:
        UserError: Sizes that are none.
    """
    given = {name: getattr(arguments, name) for name in _AS_GIVEN}
    config = str(arguments.config) if arguments.config else None
    return {"sizes": parse_sizes(arguments.sizes), "config": config, **given}


def require_gpu() -> None:
    """Check for a driver, before anything is started. Local.

    Raises:
        UserError: There is none.
    """
    if not has_gpu():
        raise UserError("bench gpu: expected one of NVIDIA's GPUs, this machine has no driver for any")


def run(options: Mapping[str, Any], as_json: bool, child: Sequence[str] = CHILD) -> int:
    """Take part in the benchmark; rank 0 prints what came of it. Collective, in the children.

    Returns:
        The exit code: 0, also if windows on GPUs ended it; 1 if anything else did.

    Raises:
        UserError: A mistake of the user's; what was known before is printed. From rank 0.
    """
    rank = launched_rank()
    timeout_s = float(options["timeout_s"])
    deadline_s = timeout_s - min(MARGIN_S, timeout_s / 2)
    with take_part([*child, json.dumps(dict(options))], rank, deadline_s, QUIET_S, _say) as ending:
        return 0 if rank else _tell(ending, as_json)


def outcome(ending: Ending) -> tuple[dict[str, Any], str | None]:
    """Return the result so far, and the failure: None without one, or if windows on GPUs caused it. Local."""
    result = ending.news.get("result", {})
    if ending.trouble is None:
        return result, None
    doing, failure = ending.trouble
    if ending.news.get("may_end"):
        result["left_out"][ENDED] = f"{doing}: {failure}"
        return result, None
    return result, f"{doing}: {failure}"


def _tell(ending: Ending, as_json: bool) -> int:
    """Print what is known and return the exit code."""
    result, failure = outcome(ending)
    if result.get("sizes") or result.get("kernels") or result.get("step"):
        show(result, as_json)
    ending.show_last_words()
    error = ending.news.get("error")
    if error is not None:
        raise UserError(error)
    if failure is not None:
        say(failure)
        return 1
    return 0


def _say(news: Mapping[str, Any]) -> None:
    if news["doing"] is not None:
        speaker(0)(news["doing"])
