"""A training run across two hosts gives the losses of a run in one process."""

import json

import pytest
from mpi_launch import launch as launch_here
from small_run import write_config
from two_hosts import launch

#: Settings of the communication that a run across hosts must work with.
SETTINGS = [
    "",
    "reduction=accumulate progress=thread",
    "reduction=accumulate progress=off",
    "reduction=mailbox progress=thread",
    "reduction=mailbox progress=off balance=dynamic",
    "zero_copy=off reduction=mailbox mailbox_bytes=8192 prefetch=2",
]
#: Those that two ranks on each host are tried with, too: near and far peers at once.
SETTINGS_OF_FOUR = [SETTINGS[0], f"{SETTINGS[1]} balance=dynamic", SETTINGS[-1]]
#: Where one host has more ranks than the other, by the ranks of each.
UNEVEN = [("2,1", SETTINGS[-1]), ("1,2", "balance=dynamic")]


def section_of(setting):
    return "data" if setting.startswith("balance") else "comm"


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The losses of one process."""
    directory = tmp_path_factory.mktemp("alone")
    done = launch_here(0, "-m", "odc_mpi", "train", "--config", write_config(data, directory))
    assert done.code == 0, done.err
    return losses(directory / "run")


@pytest.mark.parametrize(
    ("ranks_per_host", "settings"),
    [(1, settings) for settings in SETTINGS] + [(2, settings) for settings in SETTINGS_OF_FOUR] + UNEVEN,
    ids=lambda value: value or "as it comes",
)
def test_losses_are_those_of_one_process(config, alone, tmp_path, ranks_per_host, settings):
    # A wait that hangs names itself; four ranks on two busy cores took up to 45 s for all.
    command = ("-m", "odc_mpi", "train", "--config", config, "--comm.timeout_s", 60)
    done = launch(ranks_per_host, *command, *(f"--{section_of(s)}.{s}" for s in settings.split()), timeout_s=100)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    counts = [int(count) for count in str(ranks_per_host).split(",")]
    assert summary["ranks_per_node"] == (counts if len(counts) == 2 else 2 * counts)
    for name, value in (setting.split("=") for setting in settings.split()):
        assert str(summary.get(name, value)) == value
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


#: Sequences have up to 29 tokens, so many must be cut. Keys and values are fetched over the network.
IN_PIECES = ["--data.balance", "dynamic", "--data.context_parallel", "auto", "--data.max_tokens_per_microbatch", 16]


@pytest.mark.parametrize(
    ("ranks_per_host", "settings"),
    [(1, ""), (1, "reduction=mailbox progress=off"), (2, "zero_copy=off prefetch=2")],
    ids=lambda value: value or "as it comes",
)
def test_sequences_in_pieces_across_hosts(config, alone, tmp_path, ranks_per_host, settings):
    command = ("-m", "odc_mpi", "train", "--config", config, "--comm.timeout_s", 60, *IN_PIECES)
    done = launch(ranks_per_host, *command, *(f"--comm.{s}" for s in settings.split()), timeout_s=100)
    assert done.code == 0, done.err
    assert "too long for an even share" in done.out
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["num_cut_sequences"] for step in steps) >= 8
    assert [step["loss"] for step in steps] == pytest.approx(alone, rel=1e-5)
