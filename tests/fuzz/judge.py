"""Judgment of the end of a case: traceback, hang, wrong exit code, loss of a file, silently wrong result."""

import hashlib
import json
import os
import re
import stat
from pathlib import Path

SEVERITIES = {"T": "tracebacks", "H": "hangs", "W": "wrong exit codes", "L": "losses", "S": "silent"}
_TEMPORARY = re.compile(r"^\..*|.*\.(tmp|part)$")


def snapshot(directory):
    """Return a digest by relative path of all regular files, and the kind of all others. Symbolic links are kept."""
    entries = {}
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            content = ""
            if stat.S_ISREG(mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(mode):
                content = str(path.readlink())
            entries[str(path.relative_to(directory))] = (stat.S_IFMT(mode), content)
    return entries


def result(case, directory, finished):
    """Return what a command computed: losses, exported files, or what it printed."""
    if case.argv[0] == "train":
        run_dir = directory / case.argv[case.argv.index("--run.dir") + 1]
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [[line.get(key) for key in ("step", "loss", "eval_loss")] for line in lines]
    if case.argv[0] == "export":
        return snapshot(directory / "new")
    return finished.out


def judge(case, finished, before, after, expected, got):
    """Return the findings as texts, each beginning with its letter; M is a message of more than one line."""
    found = []
    # Without progress bars, which `prepare` writes to standard error.
    errors = [line for line in finished.err.splitlines() if line.strip() and not re.search(r"\d%|-:--:--", line)]
    if finished.code is None:
        return [f"H: no end within {case.limit_s:g} s"]
    if finished.code < 0:
        found.append(f"T: ended by signal {-finished.code}")
    elif "Traceback (most recent call last)" in finished.err:
        last = [line for line in errors if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
        found.append(f"T: {(last or errors)[-1][:160]}")
    if finished.code not in case.codes:
        found.append(f"W: exit code {finished.code}, expected {' or '.join(map(str, case.codes))}")
    changed = [path for path, value in before.items() if after.get(path) != value]
    lost = [path for path in changed if Path(path).parts[0] not in case.writes]
    left = [path for path in after.keys() - before.keys() if any(map(_TEMPORARY.match, Path(path).parts))]
    found += [f"L: changed or lost: {', '.join(sorted(lost)[:3])}"] if lost else []
    found += [f"L: left behind: {', '.join(sorted(left)[:3])}"] if left else []
    if case.same and finished.code == 0 and got != expected:
        found.append(f"S: {_first_difference(got, expected)}")
    if finished.code == 2 and len(errors) != 1 and not found:
        found.append(f"M: {len(errors)} lines: {' | '.join(errors[:2])[:160]}")
    return found


def _first_difference(got, expected):
    if isinstance(got, list):
        pairs = [pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]]
        return f"{pairs[0][0]} instead of {pairs[0][1]}" if pairs else f"{len(got)} steps instead of {len(expected)}"
    return "another result than from undamaged files"
