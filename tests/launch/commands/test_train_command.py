"""`odc-mpi train` from a shell: its files, its output, how it ends."""

import itertools
import json
import math
import re

import pytest
import transformers
from mpi_launch import launch, odc_mpi
from small_run import MODEL, losses

from odc_mpi.shard.step_phases import SYNC_POINTS
from odc_mpi.training import settings as configuration
from odc_mpi.training.start.resolved_settings import with_device

SUMMARY = {
    *("world_size", "steps", "loss_first", "loss_last", "tokens", "tokens_per_s", "reduction", "balance"),
    *("zero_copy", "progress", "idle_fraction", "fetch_wait_s", "accumulate_wait_s", "boundary_wait_s"),
    *("peak_parameter_bytes", "collectives_per_minibatch", "mpi_library", "skipped_steps", "elapsed_s"),
    *("num_nodes", "hosts", "ranks_per_node", "window_device", "decision", "param_dtype", "device", "run_dir"),
    *("checkpoints_saved", "checkpoints_failed"),
}
LINE = {
    *("step", "loss", "mean_token_accuracy", "entropy", "grad_norm", "learning_rate", "step_s", "tokens_per_s"),
    *("num_tokens", "num_input_tokens"),
    *("idle_fraction", "microbatches_min", "microbatches_max", "slowest_rank", "skipped"),
    *("fetch_wait_s", "accumulate_wait_s", "boundary_wait_s"),
    *("time", "epoch", "tokens_per_s_per_rank", "peak_host_bytes"),
    *(f"bytes_{did}{where}" for did in ("fetched", "pushed") for where in ("", "_same_node", "_other_nodes")),
}


@pytest.mark.quick
def test_a_run_and_what_it_leaves(config, tmp_path):
    done = odc_mpi(3, "train", "--config", config)
    assert done.code == 0, done.err
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["world_size"] == 3
    assert summary["steps"] == 8
    assert summary["collectives_per_minibatch"] == 3
    assert summary["loss_last"] < summary["loss_first"]
    assert {name for text in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(text)} == LINE
    found = losses(run)
    assert len(found) == 8
    assert [found[0], found[-1]] == [summary["loss_first"], summary["loss_last"]]
    assert configuration.load(run / "config.yaml") == with_device(configuration.load(config), "cpu")
    files = {"config.yaml", "metrics.json", "metrics.jsonl", "trace.json", "summary.json", "checkpoints"}
    assert {path.name for path in run.iterdir()} == files
    assert len(re.findall(r"^\s*\d/8 ", done.out, re.M)) == 8, "a line per step, from one rank"
    assert "loss (first -> last)" in done.out
    opening = done.out.splitlines()[:7]
    assert [line.split()[0] for line in opening] == ["ranks", "model", "data", "optim", "comm", "caches", "output"]
    assert max(map(len, opening[1:])) < 120 and str(run) in opening[-1]
    assert summary["reduction"] in opening[4].lower() and "odc-mpi doctor" in opening[4]
    assert summary["decision"]["reduction"]["reason"]


def test_a_learning_rate_far_above_the_default_is_warned_of(data, tmp_path):
    model = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL)).save_pretrained(model)
    settings = ["--model.path", model, "--data.path", data, "--run.steps", 1, "--run.dir", tmp_path / "run"]
    done = odc_mpi(0, "train", *settings, "--optim.learning_rate", 1e-3)
    assert done.code == 0, done.err
    assert "optim.learning_rate is more than 10 times 2e-05, the default of this objective" in done.out
    done = odc_mpi(0, "train", *settings, "--run.resume", "never")
    assert done.code == 0 and "WARNING" not in done.out + done.err


def read_spans(local):
    return sorted(
        (began, ended, kind) for kind in ("fetch", "accumulate", *SYNC_POINTS) for began, ended in local[kind]
    )


def sum_seconds(local, kind, until_s=math.inf):
    return sum(ended - began for began, ended in local[kind] if ended <= until_s)


def test_the_trace_contains_the_waits_of_the_metrics(config, tmp_path):
    arguments = ["--run.trace_steps", 8, "--data.balance", "dynamic", "--comm.zero_copy", "off"]
    assert odc_mpi(2, "train", "--config", config, *arguments).code == 0
    run = tmp_path / "run"
    trace, summary = (json.loads((run / name).read_text()) for name in ("trace.json", "summary.json"))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in trace["steps"]] == [step["step"] for step in steps]
    for traced, output in zip(trace["steps"], steps, strict=True):
        assert len(traced["ranks"]) == 2
        for local in traced["ranks"]:
            spans = read_spans(local)
            assert spans[0][0] >= 0 and spans[-1][1] <= local["end_s"]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "they do not overlap"
            assert tuple(kind for _, _, kind in spans if kind in SYNC_POINTS) == SYNC_POINTS[1:]
            microbatches = local["microbatches"]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(microbatches))
            assert not microbatches or microbatches[-1][1] <= local["gradients_complete"][0][0]
        for kind in ("fetch", "accumulate"):
            # The metrics contain the time until the last microbatch is done.
            sums = [
                sum_seconds(local, kind, max([0.0, *(one[1] for one in local["microbatches"])]))
                for local in traced["ranks"]
            ]
            assert sum(sums) / 2 == pytest.approx(output[f"{kind}_wait_s"], abs=1e-4)
        assert sum(one[2] for local in traced["ranks"] for one in local["microbatches"]) == output["num_input_tokens"]
    everyone = [local for step in trace["steps"] for local in step["ranks"]]
    for kind in ("fetch", "accumulate"):
        assert sum(sum_seconds(local, kind) for local in everyone) / 2 == pytest.approx(
            summary[f"{kind}_wait_s"], abs=1e-3
        )
    assert sum(trace["tokens_per_microbatch"]["counts"]) == sum(len(local["microbatches"]) for local in everyone)


def check_user_error(done, *words):
    """Check that a user error is printed once, in one line, with exit code 2."""
    errors = [line for line in done.lines if "error:" in line]
    assert done.code == 2, (done.code, done.out, done.err)
    assert len(errors) == 1, done.lines
    assert "Traceback" not in done.err
    for word in words:
        assert word in errors[0]


def test_user_errors_are_printed_by_one_rank(config, tmp_path):
    mailbox = ("--comm.reduction", "mailbox", "--comm.mailbox_bytes", 100)
    check_user_error(odc_mpi(2, "train", "--config", config, *mailbox), "comm.mailbox_bytes must be at least 256")
    assert not (tmp_path / "run").exists(), "something was written before the mistake was found"


def test_a_user_error_on_one_rank_only(config, tmp_path):
    """Rank 1 does not see the data set, as on a node where it was not copied to."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, shutil, sys\n"
        "from odc_mpi.cli import main as cli\n"
        "from odc_mpi.runtime.world import MPI\n"
        "os.mkdir(f'node{MPI.COMM_WORLD.rank}')\n"
        "os.chdir(f'node{MPI.COMM_WORLD.rank}')\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    shutil.copy(sys.argv[2], 'here.h5')\n"
        "sys.exit(cli.main(['train', '--config', sys.argv[1], '--data.path', 'here.h5']))\n"
    )
    data = configuration.load(config).data.path
    check_user_error(launch(2, script, config, data, cwd=tmp_path), "here.h5", "(on rank 1)")


#: Each rank warns while it imports, from a library with a handler of its own too, and while it trains.
WARNING_RANKS = """
import logging, sys, warnings
from odc_mpi.cli import main as cli
from odc_mpi.cli import train
imported, run_on_all_ranks = train.importlib.import_module, train.run_on_all_ranks
def import_module(name, *rest, **named):
    if name == "odc_mpi.models.build":
        warnings.warn("at the import")
    return imported(name, *rest, **named)
def warned(world, work):
    logging.getLogger("transformers.x").warning("of the library, before the files are open")
    def warn_and_work():
        try:
            work()
        finally:
            logging.getLogger("transformers.x").warning("of the library")
            warnings.warn("while it trained")
    return run_on_all_ranks(world, warn_and_work)
train.importlib.import_module, train.run_on_all_ranks = import_module, warned
sys.exit(cli.main(sys.argv[1:]))
"""


def test_warnings_of_libraries_go_to_each_ranks_file_and_not_to_the_terminal(config, tmp_path):
    logs = tmp_path / "logs"
    done = launch(3, "-c", WARNING_RANKS, "train", "--config", config, "--run.steps", 1, "--run.log_dir", logs)
    assert done.code == 0, done.err
    for words in ("UserWarning: at the import", "UserWarning: while it trained", "of the library\n"):
        assert words not in done.out + done.err, words
        assert [path.read_text().count(words) for path in sorted(logs.iterdir())] == [1, 1, 1], words
