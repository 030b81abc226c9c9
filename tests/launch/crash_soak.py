"""Kill a run at random moments, again and again; saved checkpoints are always complete, and little is lost.

    python tests/launch/crash_soak.py --kills 50

A run on three ranks saves every other step. One of its ranks gets SIGKILL, at a random moment after the start; then the
run is started once more, every third time on two ranks. Each start must find the newest complete checkpoint, and little
may be lost: what came after it, and what was still being written. In the end every byte is verified.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fakes"))  # for a run by hand
from mpi_launch import kill_a_rank_when, start
from small_run import last_step, write_config, write_data

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
    """Run, kill, resume; raise AssertionError where something was lost. Return the number of checkpoints."""
    draw = random.Random(seed)
    config, run = write_config(write_data(directory / "small.h5"), directory), directory / "run"
    saving = ("--run.steps", 100_000, "--run.checkpoint_every", EVERY)
    newest = seen = 0
    for kill in range(kills):
        early = draw.random() < early_share
        until, delay_s = 0 if early else seen + draw.randrange(1, 4 * EVERY), draw.uniform(0, 4 if early else 0.3)

        def is_due(until=until, delay_s=delay_s):
            due = last_step(run) >= until
            time.sleep(delay_s if due else 0)
            return due

        num_ranks = RANKS[kill % len(RANKS)]
        process = start(num_ranks, "-m", "odc_mpi", "train", "--config", config, *saving)
        killed = kill_a_rank_when(process, is_due, num_ranks=num_ranks, choose=draw.choice)
        assert killed.code != 0
        assert early or newest == 0 or f"resuming from step {newest}:" in killed.out, (newest, killed.out, killed.err)
        seen = last_step(run)
        before, newest = newest, max(steps_in(run / "checkpoints"), default=0)
        assert newest >= before
        lost = seen - newest
        assert lost <= INTERVALS * EVERY, f"kill {kill}: of {seen} steps the checkpoint has {newest}"
        print(f"kill {kill + 1} of {kills}: at step {seen}, the newest checkpoint is of step {newest}", flush=True)
    lines, damaged = verify(run / "checkpoints")
    assert damaged == 0, lines
    return len(lines)


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
