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
#: By the ranks of each host; of the last one host has more than the other. `UNALIGNED` has more on the other host.
RUNS = {
    1: [*SETTINGS, f"{CHUNKS} reduction=mailbox progress=off"],
    2: [*SETTINGS_OF_FOUR, f"{CHUNKS} zero_copy=off prefetch=2"],
    "2,1": [SETTINGS[-1], "balance=dynamic"],
}
#: Ranks of each host on which islands of two and of three ranks are not aligned with hosts: one of them spans both.
UNALIGNED = "1,5"
#: With these settings, islands that train separately take the same steps as islands that share a model.
SGD = "optim.optimizer=sgd optim.learning_rate=0.5 optim.max_grad_norm=0 run.steps=3"
OUTER = "islands.mode=outer islands.sync_every=1 islands.outer_learning_rate=1 islands.outer_momentum=0"
ISLANDS = [f"islands.by={by} {mode} {SGD}" for mode in ("islands.mode=hybrid", OUTER) for by in (1, 2, 3)]
#: Seconds of a run. A wait that hangs names itself; four ranks on two busy cores took up to 45 s.
LIMIT_S = 60
#: One rank: trains by each configuration, into its own directory.
JOB = """
import json, sys
from pathlib import Path
from odc_mpi.runtime.world import World
from odc_mpi.training.train import train
from odc_mpi.training.settings import load

with World(timeout_s=60) as world:
    for directory, settings in json.loads(sys.argv[2]).items():
        train(load(Path(sys.argv[1]), ["--run.dir", directory, *settings]), world)
"""


def in_sections(settings):
    """Arguments of `odc-mpi train` for settings, of data and comm without their sections."""
    of_data = ("balance", "context_parallel", "max_tokens_per_microbatch")
    for name, value in (setting.split("=") for setting in settings.split()):
        section = "" if "." in name else "data." if name in of_data else "comm."
        yield from (f"--{section}{name}", value)


def job_of(data, top, all_settings):
    """Arguments of python for a job that trains with each of some settings, and the directories of these runs."""
    (top / "job.py").write_text(JOB)
    directories = {settings: top / str(number) for number, settings in enumerate(all_settings)}
    runs = {str(place): [*in_sections(settings), "--comm.timeout_s", "60"] for settings, place in directories.items()}
    return [top / "job.py", write_config(data, top), json.dumps(runs)], directories


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The losses of one process, by its settings."""
    job, directories = job_of(data, tmp_path_factory.mktemp("alone"), ["", SGD])
    done = launch_here(0, *job)
    assert done.code == 0, done.err
    return {settings: losses(place) for settings, place in directories.items()}


@pytest.fixture(scope="module")
def run_dir(data, tmp_path_factory):
    """A function that returns where a run of some settings is, once it and those that share its job have ended."""

    @cache
    def finished(ranks_per_host):
        all_settings = {**RUNS, UNALIGNED: ISLANDS}[ranks_per_host]
        job, directories = job_of(data, tmp_path_factory.mktemp("two_hosts"), all_settings)
        return launch(ranks_per_host, *job, timeout_s=LIMIT_S * len(directories)), directories

    def run_dir_and_output(ranks_per_host, settings):
        done, directories = finished(ranks_per_host)
        place = directories[settings]
        assert (place / "summary.json").exists() and done.code == 0, done.err
        return place, done.out

    return run_dir_and_output


@pytest.mark.timeout(60 + LIMIT_S * len(RUNS[1]))
@pytest.mark.parametrize(
    ("ranks_per_host", "settings"),
    [
        pytest.param(ranks, settings, marks=[] if ranks == "2,1" else pytest.mark.library)
        for ranks, each in RUNS.items()
        for settings in each
    ],
    ids=lambda value: value or "as it comes",
)
def test_losses_are_those_of_one_process(run_dir, alone, ranks_per_host, settings):
    place, output = run_dir(ranks_per_host, settings)
    summary = json.loads((place / "summary.json").read_text())
    counts = [int(count) for count in str(ranks_per_host).split(",")]
    assert summary["ranks_per_node"] == (counts if len(counts) == 2 else 2 * counts)
    for name, value in (setting.split("=") for setting in settings.split()):
        assert str(summary.get(name, value)) == value
    assert losses(place) == pytest.approx(alone[""], rel=1e-5)
    if CHUNKS in settings:
        assert "too long for an even share" in output
        steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert sum(step["num_cut_sequences"] for step in steps) >= 8


@pytest.mark.timeout(60 + LIMIT_S * len(ISLANDS))
def test_islands_that_are_not_aligned_with_hosts_train_as_one_process_does(run_dir, alone):
    wanted = alone[SGD]
    assert wanted[-1] < wanted[0] - 0.1
    for settings in ISLANDS:
        place, _ = run_dir(UNALIGNED, settings)
        summary = json.loads((place / "summary.json").read_text())
        assert (summary["ranks_per_node"], f"islands.by={6 // summary['num_islands']}") == ([1, 5], settings.split()[0])
        assert losses(place) == pytest.approx(wanted, rel=1e-5), settings
