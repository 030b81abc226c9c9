"""Each block of README and docs that is marked `sh` or `python` runs as it is written, after those before it.

Each is a test of its own, with the page and the line in its name.

A page runs in a directory with a tiny model in MODEL_DIR, the files of data that pages name, and job.yaml with its run
in runs/job. Lines that begin with `make` are left out. A Python block that begins with a comment such as `# train.py`
is saved under this name, for the commands after it; others are run.
"""

import functools
import gzip
import itertools
import json
import re
import shutil

import pytest
import yaml
from doc_blocks import EXECUTED, PAGES, ROOT, blocks, commands
from mpi_launch import finish, start, start_shell
from small_run import write_model

from odc_mpi.cli.main import main
from odc_mpi.observe.metrics import read_declarations

#: This page's commands, with a rank killed between two of them, are run by test_post_training.py.
ELSEWHERE = ("start_to_end.md",)
RUN = [
    pytest.param(page, number, id=f"{page.stem}:{block.line}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.kind in EXECUTED and page.name not in ELSEWHERE
]
#: Commands of README in blocks that are only parsed here: the test or script that runs them, and words in it.
COMMANDS = {
    "git clone": (".ci/run", "make environment"),
    "make run": ("tests/launch/commands/test_make_run.py", '"run-dpo", "run-rl"'),
    "make test": (".ci/run", "make test\n"),
    "pip install": ("tests/test_packaging.py", "install --quiet"),
    ". .venv": (".ci/run", "make environment"),
    "srun": ("tests/slurm/test_slurm.py", "{SRUN} doctor"),
    "odc-mpi job": ("tests/slurm/test_slurm.py", '"odc-mpi", "job"'),
}

JOB = {
    "model": {"path": "MODEL_DIR"},
    "data": {"path": "job.h5", "eval_path": "job.eval.h5", "minibatch_sequences": 4},
    "run": {"steps": 2, "dir": "runs/job"},
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The directory that each page gets a copy of."""
    folder = tmp_path_factory.mktemp("files")
    lines = (ROOT / "jobs" / "chats.jsonl").read_text().splitlines()[:40]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    questions = [{"prompt": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    answers = [{"prompt": f"What is {i} plus 1?", "chosen": str(i + 1), "rejected": "many"} for i in range(40)]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    labeled = [
        {"prompt": f"What is {i} plus 1?", "completion": str(i + 1 + i % 2), "label": i % 2 == 0} for i in range(40)
    ]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(line) + "\n" for line in labeled))
    (folder / "jobs").symlink_to(ROOT / "jobs")
    (folder / "code.csv").write_text("text\n" + "".join(f"x = {i}\n" for i in range(20)))
    (folder / "shards").mkdir()
    (folder / "shards" / "0.jsonl").write_text("".join(json.dumps({"text": f"The {i}."}) + "\n" for i in range(20)))
    (folder / "chats.jsonl.gz").write_bytes(gzip.compress((folder / "chats.jsonl").read_bytes()))
    prepare = ["prepare", str(folder / "chats.jsonl"), "--vocab-size", "300", "--eval-fraction", "0.1"]
    assert main([*prepare, "--out", str(folder / "job.h5")]) == 0
    write_model(folder / "job.h5", folder / "MODEL_DIR", vocab_size=304, max_position_embeddings=512)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = finish(start(0, "-m", "odc_mpi", "train", "--config", "job.yaml", cwd=folder))
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def places(files, tmp_path_factory):
    """Return the directory of a page, and the numbers of its blocks that have not run yet."""

    @functools.cache
    def place(page):
        folder = tmp_path_factory.mktemp(page.stem) / "work"
        shutil.copytree(files, folder, symlinks=True)
        return folder, iter(range(len(blocks(page))))

    return place


@pytest.mark.parametrize(("page", "number"), RUN)
def test_a_block_runs_as_written(places, page, number):
    folder, remaining = places(page)
    for each in itertools.takewhile(lambda each: each <= number, remaining):
        block = blocks(page)[each]
        if block.kind == "python":
            run_program(block, folder)
        elif block.kind == "sh":
            run_commands(block, folder)
        if each == number:
            break  # takewhile would skip the next one
    check_metrics(folder)


@pytest.mark.quick
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=f"README:{block.line}") for block in blocks(PAGES[0]) if block.kind == "console"],
)
def test_a_block_of_readme_that_is_only_parsed_is_run_elsewhere(block):
    for command in block.text.splitlines():
        (runs,) = [runs for begin, runs in COMMANDS.items() if command.startswith(begin)]
        assert runs[1] in (ROOT / runs[0]).read_text(), command


def check_metrics(folder):
    """Whatever the runs of the page have written is declared, and so in the manual's table of metrics."""
    for path in folder.glob("runs/*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        written = {key for line in [*lines, json.loads(path.with_name("summary.json").read_text())] for key in line}
        declared = {key for metric in read_declarations(path.parent) for key in (metric.key, *metric.entries)}
        assert written - declared == set()


def run_program(block, folder):
    name = re.match(r"# (\w+\.py)\n", block.text)
    (folder / (name[1] if name else "block.py")).write_text(block.text)
    if not name:
        check(block, finish(start(0, "block.py", cwd=folder)))


def run_commands(block, folder):
    script = "set -euo pipefail\n" + "\n".join(commands(block))
    check(block, finish(start_shell(script, folder), timeout_s=400))


def check(block, finished):
    assert finished.code == 0, f"line {block.line}:\n{block.text}\n{finished.out}\n{finished.err}"
