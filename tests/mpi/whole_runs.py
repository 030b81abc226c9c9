"""Runs of some steps in a directory, which are interrupted, damaged and started again."""

import json

STEPS = 6
#: So that the learning rate does not depend on the number of steps, which differs between runs here.
SETTINGS = {"optim.lr_scheduler_type": "constant", "comm.timeout_s": 60, "run.steps": STEPS}


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    found = lines(run_dir)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found]
