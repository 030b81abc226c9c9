"""The undamaged files: sources of text, data sets, a run with two checkpoints, a model directory, settings."""

import gzip
import json
import random

import yaml
from case import export, prepare, train
from tiny_qwen2 import QWEN2

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "as", "with", "on", "by", "this", "be", "are", "from")
MODEL = QWEN2 | {"vocab_size": 320, "hidden_size": 16, "max_position_embeddings": 512}
SETTINGS = {
    "model": {"config": MODEL},
    "data": {"path": "data.h5", "minibatch_sequences": 24, "max_tokens_per_microbatch": 512},
    "optim": {"learning_rate": 0.01, "lr_scheduler_type": "constant"},
    "run": {"steps": 1, "dir": "new", "threads": 1, "trace_steps": 1},
}
#: Settings of the run in the folder "run": two checkpoints, which a third step continues.
TWO_STEPS = ("--run.steps", 2, "--run.checkpoint_every", 1, "--run.eval_every", 1, "--data.eval_path", "eval.h5")
#: Commands that make the files, after `write_sources`.
COMMANDS = (
    prepare(out="data.h5"),
    prepare("b.jsonl", out="eval.h5", options=("--tokenizer", "data.h5")),
    train(*TWO_STEPS, run_dir="run"),
    export(out="model"),
)


def text(rng, length=12):
    return " ".join(rng.choices(WORDS, k=length))


def write_sources(directory):
    import pyarrow
    import pyarrow.parquet

    rng = random.Random(0)
    rows = [{"prompt": text(rng), "completion": " " + text(rng)} for _ in range(16)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "a.jsonl").write_text(lines)
    (directory / "b.jsonl").write_text("".join(json.dumps({"text": text(rng)}) + "\n" for _ in range(8)))
    (directory / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "d.parquet")
    (directory / "notes.txt").write_text("my notes\n")
    (directory / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
