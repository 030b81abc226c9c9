"""An input of the fuzzer, the commands it is given to, and damage to files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A command in a copy of the undamaged files, after some damage to them.

    A command that succeeds prints a result; one that fails prints one line.
    """

    family: str
    name: str
    argv: tuple[str, ...]
    damage: Callable[[Path], object] = lambda directory: None  # of the directory of the copy
    codes: tuple[int, ...] = (0, 2)  # exit codes that are right
    same: bool = False  # with code 0, only the result from undamaged files is right: losses, text or exported files
    limit_s: float = 30.0  # then the command counts as hanging
    ranks: int = 0  # under mpiexec; 0: no launcher
    real: bool = False  # in a process of its own, for inputs that act on the start of the interpreter
    env: Mapping[str, str | None] = field(default_factory=dict)  # None removes a variable
    limits: Mapping[int, int] = field(default_factory=dict)  # as for `resource.setrlimit`
    writes: tuple[str, ...] = ("new",)  # names in the directory that the command may change
    mount: str = ""  # size of a file system mounted on the folder "full", such as 64k; needs root


def prepare(*sources, out="out.h5", options=()):
    return ("prepare", *(sources or ("a.jsonl", "b.jsonl")), "--out", out, "--vocab-size", "300", *options)


def export(run_dir="run", out="new"):
    return ("export", run_dir, "--out", out)


def train(*settings, config="config.yaml", run_dir="new"):
    return ("train", "--config", config, "--run.dir", run_dir, *map(str, settings))


def write(name, content):
    """Damage: write text or bytes to a file, and make its folder."""

    def damage(directory):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return damage


def change(name, function):
    """Damage: replace the content of a file, bytes, by `function(content)`."""

    def damage(directory):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(function(content))

    return damage


def replacements(name):
    """Yield what may be in the place of a file, and the damage: nothing, a folder, a link to itself."""
    for kind, make in {
        "missing": lambda path: None,
        "a folder": Path.mkdir,
        "a loop": lambda path: path.symlink_to(path.name),
    }.items():
        yield kind, lambda directory, make=make: ((directory / name).unlink(), make(directory / name))


def mutation(rng):
    """Return a random change of a content, as a name and a function that changes at least one byte."""
    kind = rng.choice(("flip", "flip", "zero", "delete", "repeat", "insert", "cut"))
    where, size, noise = rng.random(), int(2 ** rng.uniform(0, 14)), rng.randbytes(64)

    def apply(content):
        at = int(where * len(content))
        head, part, rest = content[:at], content[at : at + size], content[at + size :]
        new = {
            "flip": bytes([part[0] ^ (1 << size % 8)]) + part[1:],
            "zero": bytes(len(part)) if any(part) else b"\xff" * len(part),
            "repeat": part + part,
            "insert": noise[: 1 + size % 64] + part,
        }
        return head + new.get(kind, b"") + (b"" if kind == "cut" else rest)

    return f"{kind} {size} at {where:.4f}", apply
