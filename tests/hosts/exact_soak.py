"""An exact run in all the ways that it can be run: on any number of ranks, slowed, on two hosts, killed and resumed.

    python tests/hosts/exact_soak.py --steps 50

All must end with the digest of the run on one rank, and a run that adds gradients up in fp32 must not.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import two_hosts  # also makes the modules of tests/launch importable
from crash_soak import _config, _last_step, _ranks_of
from mpi_launch import finish, launch, start

TIMEOUT_S = 600
SLOWED = [__file__, "--slowed"]
PLAIN = ["-m", "odc_mpi"]
SETTINGS = (
    "--run.exact",
    "true",
    "--run.checkpoint_every",
    5,
    "--optim.adam_epsilon",
    1e-8,
    "--optim.weight_decay",
    0.1,
)


def train_slowed(arguments):
    """The program of a rank: a training in which each microbatch may take longer."""
    from odc_mpi.cli.main import main as odc_mpi
    from odc_mpi.train.objectives.sft import SupervisedFineTuning

    after_microbatch = SupervisedFineTuning.after_microbatch

    def late(self, ran):
        time.sleep(random.choice([0, 0, 0.002, 0.02]))
        after_microbatch(self, ran)

    SupervisedFineTuning.after_microbatch = late
    return odc_mpi(arguments)


def ways():
    """Yield a name, how ranks are started, the program, and more settings."""
    number = 0
    for ranks in (2, 3, 4, 8):
        for reduction in ("accumulate", "mailbox"):
            for prefetch in (0, 2):
                number += 1
                balance = ("lb_mini", "dynamic")[number % 2]
                cache = ("auto", 0)[number // 2 % 2]
                program = (SLOWED, PLAIN)[ranks == 8 or number % 3 == 0]
                settings = {"comm.reduction": reduction, "comm.prefetch": prefetch, "data.balance": balance}
                settings |= {"comm.gradient_cache_bytes": cache, "comm.zero_copy": ("auto", "off")[number % 2]}
                yield (
                    f"{ranks}_{reduction}_{prefetch}",
                    lambda *a, n=ranks: launch(n, *a, timeout_s=TIMEOUT_S),
                    (
                        program,
                        settings,
                    ),
                )
    if reason := two_hosts.missing():
        print(f"left out: two hosts ({reason})")
        return
    for ranks in ("1", "2", "2,1"):
        for reduction in ("accumulate", "mailbox"):
            yield (
                f"hosts_{ranks}_{reduction}",
                lambda *a, n=ranks: two_hosts.launch(n, *a, timeout_s=TIMEOUT_S),
                (
                    SLOWED,
                    {"comm.reduction": reduction, "data.balance": "dynamic"},
                ),
            )


def soak(directory, steps):
    """Run all ways; return how many there were."""
    config = _config(directory)

    def command(name, program, settings, *more):
        given = [text for key, value in settings.items() for text in (f"--{key}", value)]
        where = ("--config", config, "--run.steps", steps, "--run.dir", directory / name)
        return (*program, "train", *where, *SETTINGS, *given, *more)

    def digest(name, done):
        assert done.code == 0, (name, done.out, done.err)
        found = json.loads((directory / name / "summary.json").read_text())["parameters_digest"]
        print(f"{found[:16]}  {done.seconds:5.1f} s  {name}", flush=True)
        return found

    wanted, number = digest("alone", launch(1, *command("alone", PLAIN, {}), timeout_s=TIMEOUT_S)), 0
    for name, begin, (program, settings) in ways():
        number += 1
        assert digest(name, begin(*command(name, program, settings))) == wanted, f"{name} has other bits"
    for ranks, until in ((3, steps // 5), (2, 3 * steps // 5)):
        process = start(ranks, *command("killed", PLAIN, {}))
        pids = _ranks_of(process.pid, ranks)
        while _last_step(directory / "killed") < until:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        os.kill(random.choice(pids), signal.SIGKILL)
        assert finish(process).code != 0, "the run ended before it was killed"
    assert digest("killed", launch(4, *command("killed", PLAIN, {}), timeout_s=TIMEOUT_S)) == wanted
    return number + 1


def floats_differ(directory, steps):
    """Check that runs whose gradients are added up in fp32 differ, with all else as in the soak."""
    found = set()
    for ranks in (1, 3):
        name, config = f"floats_{ranks}", directory / "config.yaml"
        where = ("--config", config, "--run.steps", steps, "--run.dir", directory / name, "--run.checkpoint_every", 5)
        assert launch(ranks, *PLAIN, "train", *where, timeout_s=TIMEOUT_S).code == 0
        done = launch(0, *PLAIN, "checkpoint", "digest", directory / name)
        found.add(done.out.split()[0])
    assert len(found) == 2, "runs with fp32 sums agree: the comparison shows nothing"


def main():
    if sys.argv[1:2] == ["--slowed"]:
        return train_slowed(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        number = soak(Path(directory), arguments.steps)
        floats_differ(Path(directory), arguments.steps)
    print(f"{number} runs of {arguments.steps} steps on 1 to 8 ranks, one digest; with fp32 sums another")
    return 0


if __name__ == "__main__":
    sys.exit(main())
