"""Inputs of all commands: records, options, settings, damaged files, environments, full disks.

Inputs that are refused with a particular message are tested one by one where the rest of that code is tested.
"""

import gzip
import json
import os
import resource
import struct
from functools import partial

import h5py
from case import Case, change, export, mutation, prepare, replacements, train, write
from material import TWO_STEPS

from odc_mpi.training import settings

_HUGE = 1 << 70
_GOOD = '{"prompt": "one", "completion": "two"}\n' * 3
_OTHER_LETTERS = "数据"
#: Lines among good ones.
RECORDS = (
    *("", "{]", "\x00", "\ufeff{}", '{"a":' * 5000, '{"text": "\\u0000"}', '{"text": "a", "text": "b"}'),
    *('{"prompt": {}, "completion": "a"}', '{"messages": [{"role": "nobody", "content": "a"}]}', '{"messages": [{}]}'),
    *('{"messages": [{"role": "assistant", "content": null}]}', '{"instruction": null, "output": "b", "input": null}'),
    *('{"messages": [{"role": "assistant", "content": "a"}], "tools": 1}', '{"conversations": [{"from": "x"}]}'),
    *('{"messages": [{"role": "assistant", "content": "a"}], "tools": "["}', '{"chosen": {}, "rejected": {}}'),
    *('{"text": "' + "long " * 100_000 + '"}', '{"x": ' + "9" * 5000 + ', "text": "a"}'),
    '{"instruction": "a", "input": 1, "chosen": "b", "rejected": [{"from": "gpt", "value": "c"}], "system": 1}',
)
#: Contents of whole files.
FILES = (
    *(b"", b"\n", bytes(4096), b'prompt,completion\na,"b\n', b"<html></html>\n", gzip.compress(_GOOD.encode())),
    json.dumps([{"text": "a"}] * 3).encode()[:-9],
)
_NUMBERS = ("x", "nan", "inf", "-inf", "-1", "0", "1", "0.5", "1e3", str(_HUGE), "0x10", "\uff11")
#: Each is also given an empty text.
OPTIONS = {
    **dict.fromkeys(("--vocab-size", "--max-length", "--seed", "--eval-fraction"), _NUMBERS),
    "--num-proc": ["x", "nan", "-1", "0", "0.5"],
    "--tokenizer": [".", "missing", "notes.txt", "a.jsonl", "data.h5", "run", "model", "/dev/null", "full"],
    "--columns": ("\udcff", "prompt=missing", "prompt=completion", "text", "text=\n", "text=a,messages=b", "a=b"),
    "--overlong": ("x", "drop", "split"),
    "--bad-lines": ("x", "skip"),
    "--split": ("train",),
    "--nothing": ("1",),
    "--stopping-strategy": ("x", "all_exhausted"),
}
SOURCES = (
    *(("missing.jsonl",), ("",), (".",), ("full",), ("/",), ("/dev/null",), ("a.jsonl", "a.jsonl"), ("notes.txt",)),
    *(("data.h5",), ("run",), ("model",), ("a.jsonl:",), ("a.jsonl:x",), ("a.jsonl:nan",), ("a.jsonl:-1",)),
    *(("a.jsonl:0",), ("a.jsonl:0.5", "b.jsonl"), ("a.jsonl:1e300", "b.jsonl:1e-300"), ("a.jsonl:inf", "b.jsonl:1")),
    *(("stdlib:0",), ("a.jsonl", "stdlib:x"), ("c.jsonl.gz",), ("d.parquet",), ("x" * 300,), ("x\ny",), ("--",)),
    *(("a.jsonl:0.7", "b.jsonl:0.3"), ("a.jsonl:1e-9", "b.jsonl:1"), ("link",), ("loop",), ("pipe",), ("unreadable",)),
)
YAML = (
    *("", "null", "? [a]\n: 1", "run: {dir: !!binary aGVsbG8=}", "run: !!set {a, b}", "run: {dir: 2001-01-01}"),
    *("run: {<<: 1}", 'run: {dir: "\\e[2J"}', "run: {seed: 1:30}", "run: {seed: 0o17}", b"\xef\xbb\xbfrun: {}"),
    *("run: {}".encode("utf-16"), bytes(4096)),
)
#: Paths where a file is expected.
PATHS = (
    *("", "missing", "notes.txt", ".", "pipe", "loop", "a.jsonl", "model", "/dev/null", "/dev/zero", "/dev/full"),
    "x" * 300,
)
VALUES = (
    *("", "null", "true", "nan", "inf", "-1", "-0.0", "1e400", str(_HUGE), "[]", "{}", "x", "[nan]", "\udcff", "a: b"),
    "&a [*a]",
)
#: With these, a large value is a valid setting of a run that does not end soon.
_LONG = ("run.steps", "run.num_train_epochs", "data.minibatch_sequences", "run.threads")
#: Values of keys of model.config; some keys have values of their own besides.
MODEL_KEYS = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "architectures"),
    *("num_key_value_heads", "max_position_embeddings", "model_type", "rope_parameters", "rms_norm_eps", "hidden_act"),
    *("layer_types", "tie_word_embeddings", "dtype", "head_dim", "initializer_range", "quantization_config"),
    *("auto_map", "attention_dropout", "pad_token_id", "sliding_window", "unknown_key"),
)
MODEL_VALUES = (0, 1, 3, -1, 15, 1.5, "", "x", "nan", None, [], ["x"], {}, {"a": "\ud800"}, 10**12, _HUGE)
OWN_VALUES = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "pad_token_id"), (10**9,)),
    "hidden_size": (-16, 10**6, 10**9),
    "model_type": ("bert", "t5", "clip", "gpt2"),
    "rope_parameters": ({"rope_type": "nope"}, {"rope_type": "linear"}, {"rope_theta": "x"}),
    "layer_types": (["full_attention"], ["full_attention"] * 100),
    "dtype": ("float8_e4m3fn", "complex64"),
    "quantization_config": ({"quant_method": "nope"},),
    "auto_map": ({"AutoConfig": "x.y"},),
}
_NEWEST = "run/checkpoints/step_00000002"
CHECKPOINT_FILES = tuple(f"{_NEWEST}/{name}" for name in ("manifest.json", "step_00000002_rank_00000.h5", "index.h5"))
OTHER_FILES = ("run/metrics.json", "run/metrics.jsonl", "run/trace.json", "run/summary.json", "run/config.yaml")
_GENERATE = ("generate", "run", "--prompt", "the of", "--max-new-tokens", "2")
#: Commands that read a run: their words, and exit codes after damage to a checkpoint.
OF_A_RUN = {
    "resume": (train(*TWO_STEPS, "--run.steps", 3, run_dir="run"), (0, 2)),
    "generate": (_GENERATE, (0, 2)),
    "export": (export(), (0, 2)),
    "verify": (("checkpoint", "verify", "run"), (1, 2)),
    "list": (("checkpoint", "list", "run"), (0, 1, 2)),
    "show": (("checkpoint", "show", "run"), (0, 2)),
    "digest": (("checkpoint", "digest", "run"), (0, 2)),
    "index": (("checkpoint", "index", "run"), (0, 2)),
    "report": (("report", "run", "--out", "new.html"), (0, 2)),
}
#: Commands whose result after damage is the one without, or an error.
_SAME = ("resume", "generate", "export")
ENVIRONMENTS = (
    *({"LC_ALL": name} for name in ("C.UTF-8", "POSIX", "xx_XX.UTF-8")),
    {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    *({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1")),
    *({"HOME": path, "XDG_CACHE_HOME": None} for path in (None, "/nonexistent", "/dev/null")),
    *({"XDG_CACHE_HOME": "/proc"}, {"TMPDIR": "/nonexistent"}, {"TERM": "dumb", "COLUMNS": "1"}),
    *({"COLUMNS": "x", "LINES": "-1"}, {"OMP_NUM_THREADS": "x"}),
)
#: With less, MPICH cannot start, and the loader cannot map numpy and torch.
LIMITS = {f"{number} open files": {resource.RLIMIT_NOFILE: number} for number in (32, 64)}
LIMITS["1 GiB of addresses"] = {resource.RLIMIT_AS: 1 << 30}
#: Commands that write to the folder "full".
TO_A_FULL_DISK = {
    "prepare": prepare(out="full/out.h5"),
    "prepare, held out": prepare(out="full/out.h5", options=("--eval-fraction", "0.2")),
    "train": train("--run.checkpoint_every", 1, "--run.steps", 2, run_dir="full/run"),
    "export": export(out="full/new"),
    "report": ("report", "run", "--out", "full/new.html"),
    "generate": (*_GENERATE, "--out", "full/new.jsonl"),
}


def _odd_files(directory):
    (directory / "link").symlink_to("a.jsonl")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")
    (directory / "unreadable").mkdir(mode=0)


def prepared(rng):
    case = partial(Case, "a prepare")
    yield case("undamaged", prepare(), codes=(0,))
    for number, record in enumerate(RECORDS):
        for options in ((), ("--bad-lines", "skip")):
            name = f"record {number} {' '.join(options)}: {record[:60]!r}"
            yield case(name, prepare("a.jsonl", options=options), write("a.jsonl", _GOOD + record + "\n" + _GOOD))
    for content in FILES:
        for source, stored in {"a.jsonl": content, "a.csv": content, "c.jsonl.gz": gzip.compress(content)}.items():
            yield case(f"{source}: {content[:30]!a}", prepare(source), write(source, stored))
    for source, count in {"a.jsonl": 30, "c.jsonl.gz": 15, "d.parquet": 25}.items():
        for _ in range(count):
            name, apply = mutation(rng)
            yield case(f"{source}: {name}", prepare(source), change(source, apply))
    for option, values in OPTIONS.items():
        for value in ("", *values):
            yield case(f"{option} {value!a}", prepare(options=(option, value)))
    for sources in SOURCES:
        yield case(f"sources {' '.join(sources)[:60]!r}", prepare(*sources), _odd_files)
    name = os.fsdecode(b"\xff.jsonl")
    yield case("a source whose name is not UTF-8", prepare(name), write(name, _GOOD))
    for kind, value in {"a scalar": 1, "text": "x", "empty": h5py.Empty("u1"), "bytes": b"{}"}.items():
        argv = prepare(options=("--tokenizer", "data.h5"))
        yield case(f"tokenizer in a data set is {kind}", argv, partial(_replace_tokenizer, value))
    for out in ("missing/out.h5", "x" * 300, "/proc/out.h5", "new\n.h5"):
        yield case(f"output {out[:40]!r}", prepare(out=out))


def _replace_tokenizer(value, directory):
    with h5py.File(directory / "data.h5", "r+") as file:
        name = max(file["tokenizer"], key=lambda name: file["tokenizer"][name].size)
        del file["tokenizer"][name]
        file["tokenizer"].create_dataset(name, data=value)


def configured(rng):
    case = partial(Case, "b settings and models")
    for text in YAML:
        yield case(f"yaml: {text[:30]!a}", train(), write("config.yaml", text), (2,))
    for _ in range(40):
        name, apply = mutation(rng)
        yield case(f"config.yaml: {name}", train("--run.steps", 1), change("config.yaml", apply))
    for name in sorted(settings.defaults().keys() - {"run.dir"}):
        for value in ("", "-1", "nan", "x", "[]", "0.5") if name in _LONG else rng.sample(VALUES, 2):
            yield case(f"--{name} {value!a}", train(f"--{name}", value))
    for path in PATHS:
        yield case(f"--config {path[:40]!a}", train(config=path), _odd_files, (2,))
        yield case(f"data.path {path[:40]!a}", train("--data.path", path), _odd_files, (2,))
    for value in ("", "notes.txt", "notes.txt/x", "/proc/x", "x" * 300, "a\nb", "/dev/null", "\udcff"):
        yield case(f"run.dir {value[:30]!a}", train(run_dir=value))
    for words in (("--run.steps",), ("--run",), ("--run.steps.x", 1), ("--.", 1), ("x",), ("--run.step", 1), ("--=1",)):
        yield case(f"words {words}", train(*words), codes=(2,))
    for key in MODEL_KEYS:
        for value in map(json.dumps, (*rng.sample(MODEL_VALUES, 7), *OWN_VALUES.get(key, ()))):
            yield case(f"model.config.{key} {value}", train(f"--model.config.{key}", value))


def damaged(rng):
    """Damaged data sets and models: refused, or without effect on the losses."""
    case = partial(Case, "c data sets and models", same=True)
    model = train("--model.config", "null", "--model.path", "model")
    for argv in (train(), model):
        yield case(f"undamaged {argv[-1]}", argv, codes=(0,))
    for name, argv, count in (
        ("data.h5", train(), 150),
        ("eval.h5", train("--data.eval_path", "eval.h5"), 20),
        ("model/config.json", model, 20),
        ("model/model.safetensors", model, 15),
    ):
        for kind, damage in replacements(name):
            yield case(f"{name} is {kind}", argv, damage, (2,))
        for number in range(count):
            kind, apply = mutation(rng)
            # Of the weights, only the header has redundancy; another configuration is another model.
            early = lambda content, apply=apply: apply(content[:1200]) + content[1200:]  # noqa: E731
            damage = change(name, early if name.endswith("safetensors") else apply)
            ranks = 2 if name == "data.h5" and number % 50 == 0 else 0
            settings = {"same": name.endswith(".h5"), "ranks": ranks, "limit_s": 90.0 if ranks else 30.0}
            yield case(f"{name}: {kind}, {ranks} ranks", argv, damage, **settings)
    for size in (0, 1, 8, 1 << 20, 1 << 60, (1 << 64) - 1):
        longer = lambda content, size=size: struct.pack("<Q", size) + content[8:]  # noqa: E731
        yield case(f"header of {size}", model, change("model/model.safetensors", longer), (2,))
    for text in ("", "[]", "1", "{", "{}", "[" * 90_000):
        content = struct.pack("<Q", len(text)) + text.encode() + bytes(1000)
        yield case(f"header {text[:20]}", model, write("model/model.safetensors", content), (2,))


def run_directories(rng):
    case = partial(Case, "d run directories", writes=("new", "run"))
    for name, (argv, codes) in OF_A_RUN.items():
        same = name in _SAME
        yield case(f"{name}: undamaged", argv, codes=(0,), same=same)
        for path in CHECKPOINT_FILES:
            for kind, damage in replacements(path):
                # Without a manifest, a checkpoint is unfinished: commands use the one before it.
                expected = codes if path != CHECKPOINT_FILES[0] or kind == "a folder" else (0, 1, 2)
                equal = same and (codes is expected or name == "resume")
                yield case(f"{name}: {path} is {kind}", argv, damage, expected, equal)
    for number in range(120):
        kind, apply = mutation(rng)
        path, name = CHECKPOINT_FILES[number % 3], rng.choice([*OF_A_RUN, "resume", "verify"])
        argv, codes = OF_A_RUN[name]
        yield case(f"{name}, {path}: {kind}", argv, change(path, apply), codes, name in _SAME)
    for number in range(32):
        kind, apply = mutation(rng)
        path, name = OTHER_FILES[number % len(OTHER_FILES)], rng.choice(("report", "resume"))
        yield case(f"{name}, {path}: {kind}", OF_A_RUN[name][0], change(path, apply))
    # Two ranks repeat a step of one rank up to rounding.
    cut = change(CHECKPOINT_FILES[1], lambda content: content[:2000])
    yield case("resume: rank file cut, two ranks", OF_A_RUN["resume"][0], cut, ranks=2, limit_s=90.0)
    for source in ("", "missing", "notes.txt", "data.h5", "/dev/null", "full", "model", "x" * 300):
        for argv in (("report", source), ("checkpoint", "list", source), ("checkpoint", "verify", source)):
            codes = (1, 2) if source or argv[0] != "report" else (0, 2)
            yield case(f"{' '.join(argv[:2])[:30]} of {source[:20]!r}", argv, codes=codes)
        yield case(f"export of {source[:20]!r}", export(source), codes=(1, 2))
        if source != "model":
            yield case(f"generate of {source[:20]!r}", ("generate", source, "--prompt", "a"), codes=(1, 2))
    for out in ("notes.txt", "run", "model", "a.jsonl/x", "/dev/null", ""):
        yield case(f"export to {out!r}", export(out=out), codes=(2,), writes=())
    for out in ("notes.txt", "run", "model", "a.jsonl/x"):
        yield case(f"report to {out!r}", ("report", "run", "--out", out), writes=("notes.txt",))


def environments(rng):
    case = partial(Case, "e environments", real=True, limit_s=60.0)
    other = f"{_OTHER_LETTERS}.jsonl"
    generate = ("generate", "run", "--prompt", _OTHER_LETTERS, "--max-new-tokens", "2")
    commands = {"prepare": prepare(other), "train": train(), "generate": generate}
    for env in ENVIRONMENTS:
        for command, argv in commands.items():
            yield case(f"{command}: {env}", argv, write(other, '{"text": "a b c"}\n' * 3), codes=(0,), env=env)
    for name, limits in LIMITS.items():
        for command in (prepare(), train()):
            yield case(f"{command[0]}: {name}", command, codes=(0, 1, 2), limits=limits)
    for name, argv in TO_A_FULL_DISK.items():
        # MPI cannot start under a limit below that of its shared memory.
        sizes = {"train": (), "generate": (), "export": (2000, 8192, 40_000), "report": (2000, 8192, 40_000)}
        for size in sizes.get(name, (8192, 1 << 15)):
            limits = {resource.RLIMIT_FSIZE: size}
            yield case(f"{name} with files of at most {size}", argv, limits=limits, real=name.startswith("prepare"))
        for size in ("4k", "16k", "64k", "128k") if os.geteuid() == 0 else ():
            codes = (0, 1, 2) if name == "train" else (0, 2)
            yield case(f"{name} on a disk of {size}", argv, codes=codes, mount=size, real=False)


FAMILIES = (prepared, configured, damaged, run_directories, environments)
