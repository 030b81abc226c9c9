"""`odc-mpi train` from a shell: its files, its output, how it ends."""

import json
import re

import pytest
import transformers
from mpi_launch import launch
from small_run import MODEL, losses

from odc_mpi.cli.main import main
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
    *("num_tokens", "num_input_tokens", "push_deviation"),
    *("idle_fraction", "microbatches_min", "microbatches_max", "slowest_rank", "skipped"),
    *("fetch_wait_s", "accumulate_wait_s", "boundary_wait_s"),
    *("time", "epoch", "tokens_per_s_per_rank", "peak_host_bytes"),
    *(f"bytes_{did}{where}" for did in ("fetched", "pushed") for where in ("", "_same_node", "_other_nodes")),
}


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


@pytest.mark.quick
def test_a_run_and_what_it_leaves(config, tmp_path):
    """Warnings of libraries go to each rank's file and not to the terminal."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    settings = ["--run.log_dir", str(logs)]
    done = launch(2, "-c", WARNING_RANKS, "train", "--config", config, *settings)
    assert done.code == 0, done.err
    for words in ("UserWarning: at the import", "UserWarning: while it trained", "of the library\n"):
        assert words not in done.out + done.err, words
        assert [path.read_text().count(words) for path in sorted(logs.iterdir())] == [1, 1], words
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["world_size"] == 2
    assert summary["steps"] == 8
    assert summary["collectives_per_minibatch"] == 3
    assert summary["loss_last"] < summary["loss_first"]
    assert {name for text in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(text)} == LINE
    found = losses(run)
    assert len(found) == 8
    assert [found[0], found[-1]] == [summary["loss_first"], summary["loss_last"]]
    assert configuration.load(run / "config.yaml") == with_device(configuration.load(config, settings), "cpu")
    files = {"config.yaml", "metrics.json", "metrics.jsonl", "trace.json", "summary.json", "checkpoints"}
    assert {path.name for path in run.iterdir()} == files
    assert len(re.findall(r"^\s*\d/8 ", done.out, re.M)) == 8, "a line per step, from one rank"
    assert "loss (first -> last)" in done.out
    opening = done.out.splitlines()[:7]
    assert [line.split()[0] for line in opening] == ["ranks", "model", "data", "optim", "comm", "caches", "output"]
    assert max(map(len, opening[1:])) < 120 and str(run) in opening[-1]
    assert summary["reduction"] in opening[4].lower() and "odc-mpi doctor" in opening[4]
    assert summary["decision"]["reduction"]["reason"]


def test_a_learning_rate_far_above_the_default_is_warned_of(data, tmp_path, capsys):
    model = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL)).save_pretrained(model)
    settings = ["--model.path", model, "--data.path", data, "--run.steps", 1, "--run.dir", tmp_path / "run"]
    for more, warned in ((["--optim.learning_rate", 1e-3], True), (["--run.resume", "never"], False)):
        assert main(["train", *map(str, [*settings, *more])]) == 0
        printed = capsys.readouterr()
        words = "optim.learning_rate is more than 10 times 2e-05, the default of this objective"
        assert (words in printed.out) == ("WARNING" in printed.out + printed.err) == warned


#: All ranks have the first error. Only rank 1 has the second: it does not see the data set, as on a node where that
#: was not copied to.
TWO_ERRORS = """
import os, shutil, sys
from odc_mpi.cli import main as cli
from odc_mpi.runtime.world import MPI
train = ["train", "--config", sys.argv[1]]
assert cli.main([*train, "--comm.reduction", "mailbox", "--comm.mailbox_bytes", "100"]) == 2
os.mkdir(f"node{MPI.COMM_WORLD.rank}")
os.chdir(f"node{MPI.COMM_WORLD.rank}")
if MPI.COMM_WORLD.rank == 0:
    shutil.copy(sys.argv[2], "here.h5")
sys.exit(cli.main([*train, "--data.path", "here.h5"]))
"""


def test_user_errors_are_one_line_of_one_rank(config, tmp_path):
    done = launch(2, "-c", TWO_ERRORS, config, configuration.load(config).data.path, cwd=tmp_path)
    assert done.code == 2 and "Traceback" not in done.err, (done.code, done.out, done.err)
    first, second = [line for line in done.lines if "error:" in line or "(on rank" in line]
    assert "comm.mailbox_bytes must be at least 256" in first
    assert "error:" in second and "here.h5" in second and "(on rank 1)" in second
    assert not (tmp_path / "run").exists(), "something was written before the mistake was found"
