"""A training run across two hosts gives the losses of a run in one process.

All runs on as many ranks of each host share a job, one after the other: a start takes longer than a run.
"""

import json
from functools import cache

import pytest
from mpi_launch import launch as launch_here
from small_run import losses, write_config
from two_hosts import launch

#: Settings of the communication that a run across hosts must work with.
SETTINGS = [
    "",
    "reduction=accumulate progress=thread",
    "reduction=mailbox progress=off balance=dynamic",
    "zero_copy=off reduction=mailbox mailbox_bytes=8192 prefetch=2",
]
#: Those that two ranks on each host are tried with, too: near and far peers at once.
SETTINGS_OF_FOUR = ["reduction=accumulate progress=off balance=dynamic", SETTINGS[-1]]
#: Sequences have up to 29 tokens, so many must be cut. Keys and values are fetched over the network.
CHUNKS = "balance=dynamic context_parallel=auto max_tokens_per_microbatch=16"
#: By the ranks of each host; of the last two one host has more than the other.
RUNS = {
    1: [*SETTINGS, f"{CHUNKS} reduction=mailbox progress=off"],
    2: [*SETTINGS_OF_FOUR, f"{CHUNKS} zero_copy=off prefetch=2"],
    "2,1": [SETTINGS[-1]],
    "1,2": ["balance=dynamic"],
}
#: Seconds of a run. A wait that hangs names itself; four ranks on two busy cores took up to 45 s.
LIMIT_S = 60
#: One rank: trains by each configuration, into its own directory.
JOB = """
import json, sys
from pathlib import Path
from odc_mpi.runtime.world import World
from odc_mpi.training.run import train
from odc_mpi.training.settings import load

with World(timeout_s=60) as world:
    for directory, settings in json.loads(sys.argv[2]).items():
        train(load(Path(sys.argv[1]), ["--run.dir", directory, *settings]), world)
"""


def in_sections(settings):
    """Arguments of `odc-mpi train` for settings without their sections."""
    of_data = ("balance", "context_parallel", "max_tokens_per_microbatch")
    for name, value in (setting.split("=") for setting in settings.split()):
        yield from (f"--{'data' if name in of_data else 'comm'}.{name}", value)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The losses of one process."""
    directory = tmp_path_factory.mktemp("alone")
    done = launch_here(0, "-m", "odc_mpi", "train", "--config", write_config(data, directory))
    assert done.code == 0, done.err
    return losses(directory / "run")


@pytest.fixture(scope="module")
def run_dir(data, tmp_path_factory):
    """A function that returns where a run of some settings is, once it and those that share its job have ended."""
    top = tmp_path_factory.mktemp("two_hosts")
    (top / "job.py").write_text(JOB)
    config = write_config(data, top)

    @cache
    def finished(ranks_per_host):
        directories = {settings: str(top / f"{ranks_per_host}-{i}") for i, settings in enumerate(RUNS[ranks_per_host])}
        runs = {directory: [*in_sections(settings)] for settings, directory in directories.items()}
        runs = {directory: [*words, "--comm.timeout_s", "60"] for directory, words in runs.items()}
        done = launch(ranks_per_host, top / "job.py", config, json.dumps(runs), timeout_s=LIMIT_S * len(runs))
        return done, directories

    def run_dir_and_output(ranks_per_host, settings):
        done, directories = finished(ranks_per_host)
        place = top / directories[settings]
        assert (place / "summary.json").exists() and done.code == 0, done.err
        return place, done.out

    return run_dir_and_output


@pytest.mark.timeout(60 + LIMIT_S * len(RUNS[1]))
@pytest.mark.parametrize(
    ("ranks_per_host", "settings"),
    [(ranks, settings) for ranks, each in RUNS.items() for settings in each],
    ids=lambda value: value or "as it comes",
)
def test_losses_are_those_of_one_process(run_dir, alone, ranks_per_host, settings):
    place, output = run_dir(ranks_per_host, settings)
    summary = json.loads((place / "summary.json").read_text())
    counts = [int(count) for count in str(ranks_per_host).split(",")]
    assert summary["ranks_per_node"] == (counts if len(counts) == 2 else 2 * counts)
    for name, value in (setting.split("=") for setting in settings.split()):
        assert str(summary.get(name, value)) == value
    assert losses(place) == pytest.approx(alone, rel=1e-5)
    if CHUNKS in settings:
        assert "too long for an even share" in output
        steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert sum(step["num_cut_sequences"] for step in steps) >= 8
