"""Mutation testing: small mistakes in the package, and which of them the tests notice.

    python tests/mutation/mutants.py draw 200 --seed 1 > tests/mutation/mutants.jsonl
    python tests/mutation/mutants.py run tests/mutation/mutants.jsonl --tree CLONE > caught.jsonl

`draw` writes one mutant per line, drawn from `PACKAGES` in proportion to the places that can be changed. `run` changes
a clone with an environment (`make environment`) one mutant at a time, and runs the tests that mirror the changed
module, then those of `tests/mpi` on two ranks, each until the first failure and for at most `LIMIT_S`. Tests that reach
the limit have noticed nothing, since some folders take as long anyway. Two clones with the same package and other tests
are compared by running the same file on both. `mutants.jsonl` was drawn at commit 4791a361.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("shard", "comm", "training", "checkpoint", "data")
#: Folders of tests/mpi that belong to a package besides the one of its name.
RELATED = {
    "training": ["parity", "preferences", "rl", "islands"],
    "comm": ["parity", "islands", "device"],
    "shard": ["parity"],
}
LIMIT_S = 60
SWAPS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def changes(tree):
    """Yield `(node, new text)` for each place that can be changed; the text may contain parts as `{node}`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.left, ast.JoinedStr):
            yield node, (node.left, f" {SWAPS[type(node.op)]} ", node.right)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, (node.left, f" {SWAPS[type(node.ops[0])]} ", node.comparators[0])
        elif isinstance(node, ast.BoolOp):
            yield node, (node.values[0], f" {SWAPS[type(node.op)]} ", node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield node, (str(not node.value if isinstance(node.value, bool) else node.value + 1),)
        elif isinstance(node, ast.AugAssign) or is_call_or_result(node):
            yield node, ("pass",)
        elif isinstance(node, ast.If):
            yield node.test, ("not (", node.test, ")")


def is_call_or_result(node):
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Return) and node.value is not None


def mutants_of(path, root):
    """Yield the mutants of a module, of statements on one line."""
    source = path.read_text()
    lines = source.encode().splitlines(keepends=True)
    for node, parts in changes(ast.parse(source)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        text = b"".join(p.encode() if isinstance(p, str) else line[p.col_offset : p.end_col_offset] for p in parts)
        changed = line[: node.col_offset] + text + line[node.end_col_offset :]
        place = {"file": str(path.relative_to(root)), "line": node.lineno}
        try:
            ast.parse(b"".join([*lines[: node.lineno - 1], changed, *lines[node.lineno :]]))
        except SyntaxError:
            continue
        yield place | {"old": line.decode(), "new": changed.decode()}


def draw(root, count, seed):
    """Return mutants of different lines."""
    found = [
        mutant
        for package in PACKAGES
        for path in sorted((root / "odc_mpi" / package).rglob("*.py"))
        for mutant in mutants_of(path, root)
    ]
    random.Random(seed).shuffle(found)
    places = {}
    for mutant in found:
        places.setdefault((mutant["file"], mutant["line"]), mutant)
    return list(places.values())[:count]


def commands(tree, file):
    """Return the calls of pytest for a module of the package."""
    package = Path(file).parts[1]
    python = tree / ".venv" / "bin" / "python"
    pytest = [python, "-m", "pytest", "-q", "-x", "-m", "not slow"]
    folders = [tree / "tests" / "mpi" / name for name in (package, *RELATED.get(package, ()))]
    ranks = [tree / ".venv" / "bin" / "mpiexec", "-n", "2"]
    return [
        [*pytest, "--numprocesses", "2", "--dist", "worksteal", tree / "tests" / package],
        [*ranks, *pytest, "--capture=sys", "--with-mpi", "--only-mpi", *(each for each in folders if each.exists())],
    ]


def outcome(command, tree):
    """Run tests; return "passed", "failed", or "limit" if `LIMIT_S` expired, and leave no process behind."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*map(str, command)], cwd=tree, env=environment, start_new_session=True, **quiet)
    try:
        return "passed" if process.wait(LIMIT_S) in (0, 5) else "failed"  # 5: no tests
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(2)  # fixtures end what they have started
        return "limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(mutants, tree):
    """Yield each mutant with the outcomes of the tests, the second if the first is not "failed", and their seconds."""
    for mutant in mutants:
        path = tree / mutant["file"]
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        if lines[mutant["line"] - 1] != mutant["old"]:
            sys.exit(f"{path}:{mutant['line']}: expected {mutant['old']!r}, found {lines[mutant['line'] - 1]!r}")
        lines[mutant["line"] - 1] = mutant["new"]
        begun, outcomes = time.monotonic(), []
        try:
            path.write_text("".join(lines))
            for command in commands(tree, mutant["file"]):
                if "failed" not in outcomes:
                    outcomes.append(outcome(command, tree))
        finally:
            path.write_text(source)
        yield mutant | {"outcomes": outcomes, "s": round(time.monotonic() - begun, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("count", type=int)
    drawing.add_argument("--seed", type=int, default=1)
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    given = parser.parse_args()
    if given.command == "draw":
        lines = draw(Path(__file__).parents[2], given.count, given.seed)
    else:
        lines = run([json.loads(line) for line in given.mutants.read_text().splitlines()], given.tree.resolve())
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
