"""Reward for mathematical answers: numbers, fractions, sets, intervals and expressions, compared by math-verify.

A completion may have a value that takes years to compute, such as a power of powers, in a single call into C. Python
cannot interrupt it, also not from another thread. Therefore the answers are compared in processes (`math_worker`).
"""

import atexit
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from odc_mpi.errors import UserError

#: Limit in seconds of processor time for a completion, after which its reward is 0.
LIMIT_S = 2.0
_PROGRAM = Path(__file__).with_name("math_worker.py")
#: Processes that wait for a line.
_idle: list["subprocess.Popen[str]"] = []


def require_math_verify() -> None:
    """Raise `UserError` if the package math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("rl.reward_funcs: math requires math-verify: pip install 'odc_mpi[math]'")


def compare(text: str, answer: str) -> float | None:
    """Return 1 if the last mathematical value in `text` equals `answer`, else 0, or None if `answer` has no value.

    May be called in any thread.
    """
    try:
        process = _idle.pop()
    except IndexError:
        process = _start()
    assert process.stdin and process.stdout
    line = ""
    try:
        print(json.dumps([answer, text, LIMIT_S]), file=process.stdin, flush=True)
        line = process.stdout.readline()
    except BrokenPipeError:
        pass
    finally:
        if not line:  # the limit has expired, or that of the function
            process.kill()
            process.communicate()
    if not line:
        return 0.0
    _idle.append(process)
    result: float | None = json.loads(line)
    return result


def _start() -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(_PROGRAM)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{_PROGRAM.name} did not start")
    return process


@atexit.register
def close() -> None:
    """End all processes."""
    while _idle:
        _idle.pop().communicate()  # at the end of its input, a process ends
