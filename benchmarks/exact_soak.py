"""Exact runs in many variants: on any number of ranks, slowed, on two hosts, killed and resumed.

    python benchmarks/exact_soak.py --steps 50
    python benchmarks/exact_soak.py --steps 50 --only '4_*' killed     # some of the variants: names are printed

All must end with the digest of the run on one rank, and a run that sums gradients in fp32 must not.
"""

import argparse
import fnmatch
import itertools
import json
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / folder) for folder in ("hosts", "launch", "fakes")]
import two_hosts  # noqa: E402
from mpi_launch import kill_a_rank_when, launch, start  # noqa: E402
from number_words import number_words  # noqa: E402
from small_run import MODEL, last_step, write_config, write_data  # noqa: E402

TIMEOUT_S = 600
SLOWED = [__file__, "--slowed"]
PLAIN = ["-m", "odc_mpi"]
SETTINGS = {"run.exact": "true", "run.checkpoint_every": 5, "optim.adam_epsilon": 1e-8, "optim.weight_decay": 0.1}
#: Prefix of the names of the variants that use GRPO.
REWARDED = "rl_"
REWARD = """
def rising(completion_ids, start, **kwargs):
    rows = [[first, *tokens] for first, tokens in zip(start, completion_ids)]
    return [sum((b > a) / 10 + (b == a + 1) for a, b in zip(row, row[1:])) for row in rows]
"""


class Way(NamedTuple):
    """Variant of a run: how it is started."""

    name: str
    ranks: int | str  # of each of two hosts, if it is a text
    program: list[str]
    settings: dict[str, object]

    def run(self, arguments):
        """Launch python with these arguments; return the completed process."""
        begin = two_hosts.launch if isinstance(self.ranks, str) else launch
        return begin(self.ranks, *arguments, timeout_s=TIMEOUT_S)


def train_slowed(arguments):
    """Train as a rank, with a random delay in each microbatch and each generation."""
    from odc_mpi.cli.main import main as odc_mpi
    from odc_mpi.training.recipes.grpo.objective import GRPOObjective
    from odc_mpi.training.recipes.rollouts.source import RolloutSource
    from odc_mpi.training.recipes.sft.objective import SFTObjective

    def slow(instance, name):
        method = getattr(instance, name)

        def late(*arguments):
            time.sleep(random.choice([0, 0, 0.002, 0.02]))
            return method(*arguments)

        setattr(instance, name, late)

    slow(SFTObjective, "on_microbatch_end")
    slow(GRPOObjective, "on_microbatch_end")
    slow(RolloutSource, "_report_token")
    return odc_mpi(arguments)


def ways():
    """Return the variants of SFT and of GRPO."""
    found = []
    for ranks, reduction, prefetch in itertools.product((2, 3, 4, 8), ("accumulate", "mailbox"), (0, 2)):
        number = len(found) + 1
        program = (SLOWED, PLAIN)[ranks == 8 or number % 3 == 0]
        settings = {
            "comm.reduction": reduction,
            "comm.prefetch": prefetch,
            "data.balance": ("lb_mini", "dynamic")[number % 2],
        }
        settings |= {"comm.gradient_cache_bytes": ("auto", 0)[number // 2 % 2]}
        settings |= {"comm.zero_copy": ("auto", "off")[number % 2]}
        found.append(Way(f"{ranks}_{reduction}_{prefetch}", ranks, program, settings))
    for ranks, reduction in itertools.product((2, 3, 4), ("accumulate", "mailbox")):
        settings = {"comm.reduction": reduction, "comm.prefetch": (0, 2)[ranks % 2]}
        settings |= {"rl.store_bytes": (0, 700, 1 << 20)[len(found) % 3], "comm.zero_copy": ("auto", "off")[ranks % 2]}
        found.append(Way(f"{REWARDED}{ranks}_{reduction}", ranks, SLOWED, settings))
    if reason := two_hosts.missing():
        print(f"omitted: two hosts ({reason})")
        return found
    for ranks, reduction in itertools.product(("1", "2", "2,1"), ("accumulate", "mailbox")):
        settings = {"comm.reduction": reduction}
        found.append(Way(f"hosts_{ranks}_{reduction}", ranks, SLOWED, settings | {"data.balance": "dynamic"}))
        found.append(Way(f"{REWARDED}hosts_{ranks}_{reduction}", ranks, SLOWED, settings))
    return found


def soak(directory, steps, only):
    """Run all variants whose names match one of the patterns `only`; return their number."""
    number, all_ways = 0, ways()
    for kind, write in (("", small_config), (REWARDED, rewarded_config)):
        chosen = [way for way in all_ways if way.name.startswith(REWARDED) == bool(kind) and matches(way.name, only)]
        killed = f"{kind}killed"
        if chosen or matches(killed, only):
            (directory / f"{kind}runs").mkdir()
            soaking = Soaking(directory / f"{kind}runs", write, steps)
            wanted = soaking.digest(Way(f"{kind}alone", 1, PLAIN, {}))
            for way in chosen:
                assert soaking.digest(way) == wanted, f"{way.name} has another digest"
            if matches(killed, only):
                assert soaking.killed(killed) == wanted, f"{killed} has another digest"
            number += len(chosen) + matches(killed, only)
    return number


class Soaking:
    """Runs of one configuration, each in a separate directory."""

    def __init__(self, directory, write, steps):
        self._directory, self._config, self._steps = directory, write(directory), steps

    def command(self, way):
        """Return the arguments of python for a variant."""
        where = {"run.steps": self._steps, "run.dir": self._directory / way.name}
        given = [text for key, value in (where | SETTINGS | way.settings).items() for text in (f"--{key}", value)]
        return (*way.program, "train", "--config", self._config, *given)

    def digest(self, way):
        """Train; return the digest of the parameters."""
        done = way.run(self.command(way))
        assert done.code == 0, (way.name, done.out, done.err)
        found = json.loads((self._directory / way.name / "summary.json").read_text())["parameters_digest"]
        print(f"{found[:16]}  {done.seconds:5.1f} s  {way.name}", flush=True)
        return found

    def killed(self, name):
        """Train on 3 ranks until one is killed, on 2 until one is killed, on 4 to the end; return the digest."""
        way = Way(name, 4, PLAIN, {})
        for ranks, until in ((3, self._steps // 5), (2, 3 * self._steps // 5)):
            process = start(ranks, *self.command(way), timeout_s=TIMEOUT_S)
            is_due = partial(_has_done, self._directory / name, until)
            assert kill_a_rank_when(process, is_due).code != 0, "the run ended before it was killed"
        return self.digest(way)


def _has_done(run_dir, step):
    return last_step(run_dir) >= step


def small_config(directory):
    """Write a data set and a configuration; return the path of the configuration."""
    return write_config(write_data(directory / "small.h5"), directory)


def rewarded_config(directory):
    """Write prompts, a reward function and a GRPO configuration; return the path of the configuration."""
    import yaml

    number_words(59).save_pretrained(directory / "words")
    draws = random.Random(3)
    rows = [[draws.randrange(1, 59) for _ in range(draws.randrange(1, 9))] for _ in range(20)]
    lines = [json.dumps({"prompt": " ".join(map(str, row)), "start": row[-1]}) for row in rows]
    (directory / "prompts.jsonl").write_text("\n".join(lines))
    (directory / "reward.py").write_text(REWARD)
    settings = {
        "model": {"config": MODEL},
        "data": {"path": str(directory / "prompts.jsonl"), "minibatch_sequences": 24, "max_tokens_per_microbatch": 64},
        "rl": {
            "tokenizer": str(directory / "words"),
            "reward_funcs": [f"{directory}/reward.py:rising"],
            "num_generations": 4,
            "max_completion_length": 8,
        },
        "optim": {"learning_rate": 0.003},
        "run": {"objective": "grpo", "threads": 1},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def matches(name, only):
    """Return True if one of the patterns matches."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in only)


def floats_differ(directory, steps):
    """Check that runs that sum gradients in fp32 differ, with all other settings as in the soak."""
    found, config = set(), small_config(directory)
    for ranks in (1, 3):
        name = f"floats_{ranks}"
        where = ("--config", config, "--run.steps", steps, "--run.dir", directory / name, "--run.checkpoint_every", 5)
        assert launch(ranks, *PLAIN, "train", *where, timeout_s=TIMEOUT_S).code == 0
        done = launch(0, *PLAIN, "checkpoint", "digest", directory / name)
        found.add(done.out.split()[0])
    assert len(found) == 2, "runs with fp32 sums agree: the comparison proves nothing"


def main():
    """Run all selected variants; with `--slowed`, run as a rank."""
    if sys.argv[1:2] == ["--slowed"]:
        return train_slowed(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="names of variants: 4_*, killed, floats"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        number = soak(Path(directory), arguments.steps, arguments.only)
        print(f"{number} runs of {arguments.steps} steps, one digest, that of one rank")
        if matches("floats", arguments.only):
            floats_differ(Path(directory), arguments.steps)
            print("with fp32 sums another")
    return 0


if __name__ == "__main__":
    sys.exit(main())
