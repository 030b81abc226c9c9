"""Inputs of run directories: damaged checkpoints, and damaged files of metrics."""

import os
import resource

from case import Case, change, export, mutation, train, write
from material import TWO_STEPS

FAMILY = "d run directories"
_NEWEST = "run/checkpoints/step_00000002"
_MANIFEST = f"{_NEWEST}/manifest.json"
CHECKPOINT_FILES = (_MANIFEST, f"{_NEWEST}/step_00000002_rank_00000.h5", f"{_NEWEST}/index.h5")
OTHER_FILES = ("run/metrics.jsonl", "run/trace.json", "run/summary.json", "run/config.yaml")
_RESUME = train(*TWO_STEPS, "--run.steps", 3, run_dir="run")
_GENERATE = ("generate", "run", "--prompt", "the of", "--max-new-tokens", "2")
#: Commands by name: their words, and exit codes after damage to a checkpoint.
COMMANDS = {
    "resume": (_RESUME, (0, 2)),
    "generate": (_GENERATE, (0, 2)),
    "export": (export(), (0, 2)),
    "verify": (("checkpoint", "verify", "run"), (1, 2)),
    "list": (("checkpoint", "list", "run"), (0, 1, 2)),
    "show": (("checkpoint", "show", "run"), (0, 2)),
    "digest": (("checkpoint", "digest", "run"), (0, 2)),
    "index": (("checkpoint", "index", "run"), (0, 2)),
    "report": (("report", "run", "--out", "new.html"), (0, 2)),
}
_SAME = ("resume", "generate", "export")
_NESTED = "[" * 100_000
MANIFESTS = ("", _NESTED, "[]", "\0" * 500, b"\xff{}", "9" * 5000)


def cases(rng):
    for name, (argv, _) in COMMANDS.items():
        yield Case(FAMILY, f"{name}: undamaged", argv, codes=(0,), same=name in _SAME, writes=("new", "run"))
    for text in MANIFESTS:
        yield from _all(f"manifest {text[:20]!r}", write(_MANIFEST, text))
    # Without a manifest, a checkpoint is unfinished: commands use the one before it.
    yield _case("resume", "manifest missing", lambda directory: (directory / _MANIFEST).unlink())
    for path in CHECKPOINT_FILES[1:]:
        yield from _all(f"{path.rpartition('_')[2]} missing", lambda directory, path=path: (directory / path).unlink())
    for number in range(120):
        name, apply = mutation(rng)
        path = CHECKPOINT_FILES[number % len(CHECKPOINT_FILES)]
        command = rng.choice([*COMMANDS, "resume", "verify"])
        yield _case(command, f"{path.rpartition('/')[2]}: {name}", change(path, apply))
    for path in OTHER_FILES:
        for _ in range(8):
            name, apply = mutation(rng)
            argv, _codes = COMMANDS[rng.choice(("report", "resume"))]
            yield Case(FAMILY, f"{argv[0]}, {path}: {name}", argv, change(path, apply), (0, 2), writes=("new", "run"))
    for source in ("", "missing", "notes.txt", "data.h5", "/dev/null", "full", "model", "x" * 300):
        for argv in (
            ("report", source),
            ("checkpoint", "list", source),
            ("checkpoint", "verify", source),
            export(source),
        ):
            name = f"{' '.join(argv[:2])[:30]} of {source[:20]!r}"
            yield Case(FAMILY, name, argv, codes=(1, 2) if source or argv[0] != "report" else (0, 2))
        if source != "model":
            yield Case(FAMILY, f"generate of {source[:20]!r}", ("generate", source, "--prompt", "a"), codes=(1, 2))
    for out in ("notes.txt", "run", "model", "a.jsonl/x", "/dev/null", ""):
        yield Case(FAMILY, f"export to {out!r}", export(out=out))
        if out not in ("", "/dev/null"):
            yield Case(
                FAMILY, f"report to {out!r}", ("report", "run", "--out", out), codes=(0, 2), writes=("notes.txt",)
            )
    yield from _full_disks()
    yield _case("resume", "rank file cut, two ranks", change(CHECKPOINT_FILES[1], lambda content: content[:2000]), 2)


def _case(command, name, damage, ranks=0):
    argv, codes = COMMANDS[command]
    # Two ranks repeat a step of one rank up to rounding.
    same, limit_s = command in _SAME and not ranks, 90 if ranks else 30
    return Case(FAMILY, f"{command}: {name}", argv, damage, codes, same, limit_s, ranks, writes=("new", "run"))


def _all(name, damage):
    return (_case(command, name, damage) for command in COMMANDS)


def _full_disks():
    argvs = {
        "train": train("--run.checkpoint_every", 1, "--run.steps", 2, run_dir="full/run"),
        "export": export(out="full/new"),
        "report": ("report", "run", "--out", "full/new.html"),
        "generate": (*_GENERATE, "--out", "full/new.jsonl"),
    }
    for name, argv in argvs.items():
        codes = (0, 1, 2) if name == "train" else (0, 2)
        if os.geteuid() == 0:
            for size in ("4k", "16k", "64k", "128k"):
                yield Case(FAMILY, f"{name} on a disk of {size}", argv, codes=codes, mount=size)
        if name in ("export", "report"):  # MPI cannot start under a limit below that of its shared memory
            for size in (2000, 8192, 40_000):
                limits = {resource.RLIMIT_FSIZE: size}
                yield Case(FAMILY, f"{name} with files of at most {size}", argv, codes=codes, limits=limits)
