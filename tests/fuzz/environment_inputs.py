"""Inputs of the environment: locales, resource limits, home directories.

Closed and full streams are tested in tests/runtime/test_streams.py.
"""

import resource
from functools import partial

from case import Case, prepare, train, write

FAMILY = "e environments"
_OTHER_LETTERS = "数据"
LOCALES = {
    "UTF-8": {"LC_ALL": "C.UTF-8"},
    "POSIX": {"LC_ALL": "POSIX"},
    "POSIX without UTF-8 mode": {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "missing locale": {"LC_ALL": "xx_XX.UTF-8"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}
COMMANDS = {
    "prepare": prepare(),
    "train": train(),
    "generate": ("generate", "run", "--prompt", _OTHER_LETTERS, "--max-new-tokens", "2"),
}
HOMES = {
    "no HOME": {"HOME": None, "XDG_CACHE_HOME": None},
    "HOME missing": {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
    "HOME a file": {"HOME": "/dev/null", "XDG_CACHE_HOME": None},
    "cache not writable": {"XDG_CACHE_HOME": "/proc"},
    "TMPDIR missing": {"TMPDIR": "/nonexistent"},
    "TERM dumb": {"TERM": "dumb", "COLUMNS": "1"},
    "COLUMNS not a number": {"COLUMNS": "x", "LINES": "-1"},
    "threads not a number": {"OMP_NUM_THREADS": "x"},
}


#: With less, MPICH cannot start, and the loader cannot map numpy and torch.
_LIMITS = {f"{number} open files": {resource.RLIMIT_NOFILE: number} for number in (32, 64)}
_LIMITS["1 GiB of addresses"] = {resource.RLIMIT_AS: 1 << 30}
_case = partial(Case, FAMILY, real=True, limit_s=60.0)


def cases(rng):
    other = f"{_OTHER_LETTERS}.jsonl"
    for name, env in LOCALES.items():
        for command in ("prepare", "generate"):
            yield _case(f"{command}: locale {name}", COMMANDS[command], codes=(0,), env=env)
        damage = write(other, '{"text": "a b c"}\n' * 3)
        yield _case(f"a file with other letters: {name}", prepare(other), damage, codes=(0,), env=env)
    for name, env in HOMES.items():
        yield _case(f"train: {name}", COMMANDS["train"], codes=(0,), env=env)
    for name, limits in _LIMITS.items():
        for command in ("prepare", "train"):
            yield _case(f"{command}: {name}", COMMANDS[command], codes=(0, 1, 2), limits=limits)
