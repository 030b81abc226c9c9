"""Kill a run at random moments, again and again; saved checkpoints are always complete, and little is lost.

    python tests/launch/crash_soak.py --kills 50

A run on three ranks saves every other step. One of its ranks gets SIGKILL, at a random moment after the start; then the
run is started once more, every third time on two ranks. Each start must find the newest complete checkpoint, and little
may be lost: what came after it, and what was still being written. In the end every byte is verified.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import mpi_launch
from processes import descendants, is_python

from odc_mpi.checkpoint.commands import verify
from odc_mpi.checkpoint.manifest import steps_in

EVERY = 2
#: Steps here are shorter than writing. A save waits until the one before it is complete: so what is lost is the
#: interval that was being written, and the one after it. It is one, and the steps while it is written, where steps
#: take longer.
INTERVALS = 2

#: Fraction of the kills that come while a run starts, or soon after.
EARLY = 0.25
#: Ranks of successive starts.
RANKS = (3, 2, 3)


def crash(directory, kills, seed, early_share=EARLY):
    """Run, kill, resume; raise AssertionError where something was lost."""
    draw = random.Random(seed)
    config = _config(directory)
    checkpoints = directory / "run" / "checkpoints"
    newest = seen = 0
    for kill in range(kills):
        ranks = RANKS[kill % len(RANKS)]
        process = mpi_launch.start(
            ranks, "-m", "odc_mpi", "train", "--config", config, "--run.steps", 100000, "--run.checkpoint_every", EVERY
        )
        pids = _find_ranks(process.pid, ranks)
        early = draw.random() < early_share
        said = None if early else _wait_for_step(process, newest + draw.randrange(1, 4 * EVERY))
        time.sleep(draw.uniform(0, 4 if early else 0.3))
        os.kill(draw.choice(pids), signal.SIGKILL)
        finished = mpi_launch.finish(process)
        assert finished.code != 0
        assert early or newest == 0 or f"resuming from step {newest}:" in said, (newest, said, finished.err)
        seen = _last_step(directory / "run")
        before, newest = newest, max(steps_in(checkpoints), default=0)
        assert newest >= before
        lost = seen - newest
        assert lost <= INTERVALS * EVERY, f"kill {kill}: of {seen} steps the checkpoint has {newest}"
        print(f"kill {kill + 1} of {kills}: at step {seen}, the newest checkpoint is of step {newest}", flush=True)
    lines, damaged = verify(checkpoints)
    assert damaged == 0, lines
    return len(lines)


def _config(directory):
    from small_run import write_config, write_data

    return write_config(write_data(directory / "small.h5"), directory)


def _find_ranks(launcher, count):
    """The ranks' processes, children of the launcher or of a helper of its."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [pid for pid, words in descendants(launcher).items() if is_python(words)]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks did not start")


def _wait_for_step(process, step):
    """Read the output of the run until it has done a step; return all of it."""
    said = []
    for line in process.stdout:
        said.append(line)
        if line.split() and line.split()[0] == f"{step}/100000":
            return "".join(said)
    raise AssertionError("".join(said) + process.stderr.read())


def _last_step(run_dir):
    last = 0
    if not (run_dir / "metrics.jsonl").exists():
        return last
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            last = json.loads(line)["step"]
        except ValueError:
            continue  # the rank was killed in the middle of it
    return last


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        saved = crash(Path(directory), arguments.kills, arguments.seed)
    print(f"{arguments.kills} kills, {saved} checkpoints, all intact")


if __name__ == "__main__":
    main()
