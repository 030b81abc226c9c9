"""The command line in this process, on one rank: user errors of all kinds are one line and exit code 2."""

import json
import os
import shlex
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import transformers
import yaml
from small_run import MODEL, write_sequences
from user_errors import user_error

from odc_mpi.cli import main as cli
from odc_mpi.errors import AllRanksUserError, StoppedError, TrainingError
from odc_mpi.runtime import ranks
from odc_mpi.training.start import resolved_settings

QWEN2 = MODEL | {"num_hidden_layers": 1}


@pytest.fixture
def config(tmp_path):
    data = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    settings = {
        "model": {"config": QWEN2},
        "data": {"path": str(data), "minibatch_sequences": 2, "max_tokens_per_microbatch": 64},
        "run": {"steps": 2, "dir": str(tmp_path / "run"), "threads": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


#: A command, CONFIG for the file of settings, and the setting and values that its only line names.
ERRORS = {
    "train --config CONFIG --data.balanse lb_mini": "data.balanse...data.balance",
    "train --config CONFIG --data.path /nowhere/x.h5": "/nowhere/x.h5...data.path",
    f"train --config CONFIG --data.path {'x' * 300}": f"{'x' * 300}...data.path",
    "train --config CONFIG --data.max_tokens_per_microbatch 10": "10 tokens, got 20...data.max_tokens_per_microbatch",
    "train --config CONFIG --model.config.vocab_size 50": "60...50",
    "train --config CONFIG --model.config.max_position_embeddings 16": "max_position_embeddings",
    "train --config CONFIG --model.config.model_type qwen22": "model_type...qwen22...qwen2",
    "train --config CONFIG --model.path /nowhere": "model.path",
    "train --config /nowhere.yaml": "/nowhere.yaml",
    "train --config CONFIG --run.dir /proc/nowhere": "run.dir.../proc/nowhere",
    "train --config CONFIG extra": "extra",
    "--colour": "unknown argument --colour...odc-mpi --help",
    "export run to": "--out...odc-mpi export --help",
    "exprot runs/a": "unknown command 'exprot' (did you mean export?)",
    "sft": "unknown command 'sft': see odc-mpi --help",
    "prepare": "SOURCE",
    "prepare a.jsonl b.jsonl": "--out...odc-mpi prepare --help",
    "prepare a.jsonl --out ''": "--out...expected a path",
    "prepare /nowhere.jsonl --out out.h5": "/nowhere.jsonl",
    "prepare stdlib --out out.h5 --max-length 0": "--max-length",
    "prepare stdlib --out out.h5 --overlong burn": "--overlong...burn",
    "simulate --ranks 0": "--ranks: expected a number from 1 to...got 0",
    "simulate --rank 2": "unknown argument --rank: see odc-mpi simulate --help",
    "simulate --step-s 1": "unknown argument --step-s",
    "simulate --per-rank 100000 --ranks 400": "got 40000000...--per-rank",
    "job CONFIG --run.stepz 5": "run.stepz...run.steps",
    "job CONFIG --nodes 0": "--nodes...'0'",
    "job CONFIG --time '3 days'": "--time...HH:MM:SS...3 days",
    "job CONFIG --time 4:59": "--time...at least 5 minutes...'4:59'",
    "job CONFIG --partition 'a\nrm -rf b'": "--partition...'a\\nrm -rf b'",
    "job CONFIG --account 'a b'": "--account...'a b'",
    "job CONFIG --gpus-per-node '$(id)'": "--gpus-per-node...$(id)",
    "job CONFIG --mpi 'pmix; id'": "--mpi...pmix; id",
    "job CONFIG --name a/b": "--name...a/b",
    "job CONFIG --scheduler lsf": "--scheduler...lsf...slurm...pbs",
    "job CONFIG --scheduler pbs --stage d": "--stage: expected --scheduler slurm, got pbs",
    "job CONFIG --scheduler pbs --time 0": "--time: expected a time limit for PBS, got '0'",
    "job --run.steps 5 CONFIG": "5: expected a configuration file...CONFIG comes first",
}


@pytest.mark.parametrize("command", ERRORS)
def test_user_errors(config, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    before = set(tmp_path.rglob("*"))
    user_error(capsys, *shlex.split(command.replace("CONFIG", str(config))), words=ERRORS[command])
    assert set(tmp_path.rglob("*")) == before, "something was written before the mistake was found"


def test_a_run_on_one_rank(config, tmp_path, capsys):
    """Its last step is saved, without any setting; a start over its files, without checkpoints, says where they go."""
    train = ["train", "--config", str(config)]
    assert cli.main(train) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 1
    output = capsys.readouterr().out
    assert "loss (first -> last)" in output and "starting from scratch" not in output
    assert "3 sequences, 2 per step, 2 steps" in output and f"{tmp_path / 'run'}, saved after the last step" in output
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == 32
    assert cli.main([*train, "--run.steps", "1"]) == 0
    assert "already complete" in capsys.readouterr().out
    user_error(capsys, *train, "--lr", "0.5", words="other settings (optim.learning_rate 0.0001 -> 0.5)")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "other")
    assert cli.main(train) == 0
    earlier = tmp_path / "run" / "earlier-1"
    assert f"the files of the earlier run are moved to {earlier}" in capsys.readouterr().out
    assert (earlier / "metrics.jsonl").exists()
    assert cli.main([*train, "--run.resume", str(tmp_path / "other"), "--run.steps", "4"]) == 0
    assert f"the files of the earlier run are moved to {earlier.with_name('earlier-2')}" in capsys.readouterr().out


def test_bfloat16_is_warned_of_on_a_processor_without_it(config, tmp_path, monkeypatch, capsys):
    cpuinfo, lacks = tmp_path / "cpuinfo", resolved_settings._lacks_bfloat16
    for words, expected in (("avx512_bf16", False), ("bf16", False), ("flags : avx2 avx512f", True)):
        cpuinfo.write_text(words)
        assert lacks(cpuinfo) is expected and not lacks(tmp_path / "missing")
    monkeypatch.setattr(lacks, "__defaults__", (cpuinfo,))
    assert cli.main(["train", "--config", str(config), "--model.param_dtype", "bfloat16"]) == 0
    assert "this processor has no instructions for it" in capsys.readouterr().err


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["in the buffer", "beyond the buffer"])
def test_output_without_a_reader(size):
    """As of `odc-mpi checkpoint show run | head`; what fits into the buffer is written at the end only."""
    script = (
        "import sys\n"
        "from odc_mpi.cli import main as cli\n"
        f"cli.COMMANDS['checkpoint'].run = lambda arguments: print('x' * {size}) or 0\n"
        "sys.exit(cli.main(['checkpoint', 'show', 'run']))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("note", "rank", "code"),
    [(None, 0, 75), (None, 1, 75), ("note", 0, 0), ("note", 1, 0), ("no/note", 0, 75), ("no/note", 1, 0)],
)
def test_how_a_stopped_run_ends(tmp_path, monkeypatch, capsys, note, rank, code):
    def stopped():
        raise StoppedError("stopped on request after step 3")

    monkeypatch.delenv("ODC_MPI_STOPPED_FILE", raising=False)
    if note:
        monkeypatch.setenv("ODC_MPI_STOPPED_FILE", str(tmp_path / note))
    closed = []
    world = types.SimpleNamespace(rank=rank, close=lambda: closed.append(rank))
    assert ranks.run_on_all_ranks(world, stopped) == code
    assert closed == [rank]
    errors = capsys.readouterr().err.splitlines()
    assert errors[:1] == ["odc-mpi: stopped on request after step 3"] * (rank == 0)
    assert errors[1:] == [
        f"odc-mpi: cannot write ODC_MPI_STOPPED_FILE={tmp_path / 'no/note'}: No such file or directory"
    ] * (note == "no/note" and rank == 0)
    assert (tmp_path / "note").exists() == (note == "note" and rank == 0)


@pytest.mark.parametrize(("error", "code"), [(TrainingError("diverged"), 1), (AllRanksUserError("no data"), 2)])
def test_an_error_of_all_ranks_is_printed_by_the_first(capsys, error, code):
    def fail():
        raise error

    for rank in range(2):
        assert ranks.run_on_all_ranks(types.SimpleNamespace(rank=rank), fail) == code
        assert capsys.readouterr().err == f"odc-mpi: error: {error}\n" * (rank == 0)


def test_settings_from_a_pipe(config, tmp_path):
    """As of a shell's <(...): they can be read once."""
    reader, writer = os.pipe()
    os.write(writer, config.read_bytes())
    os.close(writer)
    assert cli.main(["train", "--config", f"/dev/fd/{reader}", "--run.steps", "1"]) == 0
    os.close(reader)


def test_no_mpi_library(config):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))}
    environment["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
    command = [sys.executable, "-m", "odc_mpi", "train", "--config", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("odc-mpi: error: no MPI library found (") and "pip install 'odc_mpi[mpich]'" in line


def test_sigterm_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("odc_mpi.observe.watch.watch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", str(tmp_path)])
    assert (ended.value.code, capfd.readouterr().err) == (143, "odc-mpi: ended by SIGTERM\n")


@pytest.mark.parametrize(
    ("command", "paths"),
    [
        ("export ~/a --out ~/b --base ~/c", {"directory": "a", "out": "b", "base": "c"}),
        ("generate ~/a --prompts=~/b --out=~/c", {"source": "a", "prompts": "b", "out": "c"}),
        (
            "prepare x --out ~/a --tokenizer ~/b --chat-template ~/c",
            {"out": "a", "tokenizer": "b", "chat_template": "c"},
        ),
        ("report ~/a --out ~/b", {"source": "a", "out": "b"}),
        ("job ~/a --stage ~/b", {"config": "a", "stage": "b"}),
    ],
)
def test_a_tilde_in_an_option_is_the_home_directory(monkeypatch, command, paths):
    monkeypatch.setenv("HOME", "/home/me")
    arguments = cli.parse(command.split())
    assert {name: str(getattr(arguments, name)) for name in paths} == {k: f"/home/me/{v}" for k, v in paths.items()}
