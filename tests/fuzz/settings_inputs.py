"""Inputs of settings and models: YAML files, values of settings, configurations, model directories."""

import json
import os
import struct
from operator import itemgetter

from case import Case, change, mutation, train, write

from odc_mpi.training import settings

FAMILY = "b settings and models"
RIGHT = (0, 2)
_HUGE = 1 << 70
#: What YAML has besides; documents that are no configuration are refused one by one in tests/training/test_settings.py.
YAML = {
    "empty": "",
    "null": "null",
    "keys that are lists": "? [a]\n: 1",
    "binary": "run: {dir: !!binary aGVsbG8=}",
    "a set": "run: !!set {a, b}",
    "a date": "run: {dir: 2001-01-01}",
    "a merge": "run: {<<: 1}",
    "control characters": 'run: {dir: "\\e[2J"}',
    "byte order mark": b"\xef\xbb\xbfrun: {}",
    "UTF-16": "run: {}".encode("utf-16"),
    "zeros": bytes(4096),
    "sexagesimal": "run: {seed: 1:30}",
    "octal": "run: {seed: 0o17}",
}
CONFIGS = (
    *("/dev/null", "/dev/zero", "/dev/full", "missing.yaml", ".", "", "notes.txt", "data.h5", "pipe", "loop"),
    "x" * 300,
)
VALUES = (
    *("", "null", "true", "nan", "inf", "-1", "-0.0", "1e400", str(_HUGE), "[]", "{}", "x", "[nan]", "\udcff", "a: b"),
    "&a [*a]",
)
#: With these, a large value is a valid setting of a run that does not end soon.
_LONG = ("run.steps", "run.num_train_epochs", "data.minibatch_sequences", "run.threads")
#: Values of keys of model.config.
MODEL_VALUES = {
    "num_hidden_layers": (0, -1, 1.5, "x", None, [], 10**8, _HUGE),
    "vocab_size": (0, 1, -1, 1.5, "x", None, 10**12, _HUGE),
    "hidden_size": (0, 1, 15, -16, "x", None, 10**6, 10**9, _HUGE),
    "intermediate_size": (0, -1, "x", None, 10**12, _HUGE),
    "num_attention_heads": (0, 3, -2, "x", None, 10**9),
    "num_key_value_heads": (0, 3, -1, "x", None, 10**9),
    "max_position_embeddings": (0, -1, 1, "x", None, _HUGE),
    "model_type": ("", "nope", None, 1, [], "bert", "t5", "clip", "gpt2"),
    "rope_parameters": ({"rope_type": "nope"}, {"rope_type": "linear"}, [], "x", {"rope_theta": "x"}),
    "rms_norm_eps": (0, -1, "x", None, "nan"),
    "hidden_act": ("", "nope", 1, None),
    "layer_types": ([], ["x"], "x", ["full_attention"], ["full_attention"] * 100),
    "tie_word_embeddings": ("x", None, 2),
    "dtype": ("nope", "float8_e4m3fn", 1, "complex64"),
    "head_dim": (0, -1, 7, 10**9, "x"),
    "initializer_range": (-1, "x", "nan", None),
    "quantization_config": ({}, {"quant_method": "nope"}, 1),
    "auto_map": ({"AutoConfig": "x.y"}, 1),
    "attention_dropout": (-1, 2, "x"),
    "pad_token_id": (-5, 10**9, "x"),
    "architectures": ([], ["Nope"], 1),
    "sliding_window": (0, -1, "x"),
    "unknown_key": (1, {"a": "\ud800"}),
}
_CONFIG, _WEIGHTS = "model/config.json", "model/model.safetensors"


def cases(rng):
    for name, text in YAML.items():
        yield Case(FAMILY, f"yaml: {name}", train(), write("config.yaml", text))
    for name in CONFIGS:
        yield Case(FAMILY, f"--config {name[:40]!r}", train(config=name), _odd_files)
    for _ in range(40):
        name, apply = mutation(rng)
        yield Case(FAMILY, f"config.yaml: {name}", train("--run.steps", 1), change("config.yaml", apply), RIGHT)
    for name in sorted(settings.defaults().keys() - {"run.dir"}):
        for value in ("", "-1", "nan", "x", "[]", "0.5") if name in _LONG else rng.sample(VALUES, 2):
            yield Case(FAMILY, f"--{name} {value!a}", train(f"--{name}", value), codes=RIGHT)
    for value in ("", "notes.txt", "notes.txt/x", "/proc/x", "x" * 300, "a\nb", "/dev/null", "\udcff"):
        yield Case(FAMILY, f"run.dir {value[:30]!a}", train(run_dir=value), codes=RIGHT)
    for words in (("--run.steps",), ("--run",), ("--run.steps.x", 1), ("--.", 1), ("x",), ("--run.step", 1), ("--=1",)):
        yield Case(FAMILY, f"words {words}", train(*words))
    for key, values in MODEL_VALUES.items():
        for value in values:
            argv = train(f"--model.config.{key}", json.dumps(value))
            yield Case(FAMILY, f"model.config.{key} {json.dumps(value)}", argv, codes=RIGHT)
    yield from _directories(rng)


def _odd_files(directory):
    os.mkfifo(directory / "pipe")
    (directory / "loop").symlink_to("loop")


def _directories(rng):
    """Model directories. Other configurations, indexes and tensors are refused one by one in tests/models."""
    argv = train("--model.config", "null", "--model.path", "model")
    damages = {
        "undamaged": lambda directory: None,
        "missing": lambda directory: (directory / "model").rename(directory / "other"),
        "config is a folder": lambda directory: ((directory / _CONFIG).unlink(), (directory / _CONFIG).mkdir()),
        "weights are a folder": lambda directory: ((directory / _WEIGHTS).unlink(), (directory / _WEIGHTS).mkdir()),
        "weights are a link to themselves": _looped,
        **{f"header of {size}": change(_WEIGHTS, _length(size)) for size in (0, 1, 8, 1 << 20, 1 << 60, (1 << 64) - 1)},
        **{f"header {text[:20]}": change(_WEIGHTS, _header(text)) for text in ("", "[]", "1", "{", "{}", "[" * 90_000)},
        **{f"cut at {size}": change(_WEIGHTS, itemgetter(slice(size))) for size in (0, 4, 8, 100, 2000)},
    }
    for name, damage in damages.items():
        codes = (0,) if name == "undamaged" else RIGHT
        yield Case(FAMILY, f"model: {name}", argv, damage, codes)
    for _ in range(20):
        name, apply = mutation(rng)
        yield Case(FAMILY, f"model config: {name}", argv, change(_CONFIG, apply), RIGHT)
    for _ in range(15):
        name, apply = mutation(rng)
        early = lambda content, apply=apply: apply(content[:1200]) + content[1200:]  # noqa: E731 - the header
        yield Case(FAMILY, f"model header: {name}", argv, change(_WEIGHTS, early), RIGHT)


def _looped(directory):
    (directory / _WEIGHTS).unlink()
    (directory / _WEIGHTS).symlink_to("model.safetensors")


def _length(size):
    return lambda content: struct.pack("<Q", size) + content[8:]


def _header(text):
    return lambda content: struct.pack("<Q", len(text)) + text.encode() + content[-1000:]
