"""Check the wording of docstrings, comments and Markdown; part of `make lint`.

Docstrings, comments and Markdown may not contain the idioms of `wording_idioms`. Names, string literals and code in
backticks or fences are not checked. Docstrings begin with a verb or a noun (`OPENERS`), and so do their entries.

The docstring of a public function or method of the package has a sentence that begins with Collective or One-sided if
the function's own body makes a call that communicates (`COMMUNICATING`). Exempt are properties and overrides.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from wording_idioms import ENTRIES, FORBIDDEN, OPENERS, POINTS, POINTS_DEFINED_IN, SPELLINGS

ROOT = Path(__file__).resolve().parents[1]
#: Files that are checked.
CHECKED = ("odc_mpi/**/*.py", "*.md", "docs/**/*.md", "jobs/**/*.md", "benchmarks/**/*.md")

_COLLECTIVES = (
    "Allgather Allgatherv Allreduce Alltoall Barrier Bcast Gather Reduce_scatter_block Scatter Iallgather Iallreduce "
    "Ibarrier Ibcast Ireduce_scatter allgather allreduce barrier bcast gather scatter Create Dup Free Split Split_type"
)
#: The word to use; the calls; their receivers, by last name without underscores. "" is a call without a receiver.
COMMUNICATING = (
    ("Collective", "collective wait_collective run_on_all gather_objects broadcast", "world node group self"),
    ("Collective", "require_same require_shared_memory cores_per_rank split", "world"),
    ("Collective", "gradients_complete norm parameters_published", "group"),
    ("Collective", "complete_gradients publish_parameters", "transport"),
    ("Collective", "World Window DeviceWindow SharedWindow", ""),
    ("Collective", _COLLECTIVES, "comm node_comm"),
    ("Collective", "Allocate Allocate_shared Create", "Win"),
    ("One-sided", "put get accumulate flush", "window inbox store memory elements slots flags returns"),
    ("One-sided", "fetch_and_add atomic_read atomic_store", "window board"),
    ("One-sided", "atomic_read_all atomic_store_all", "window board"),
    ("One-sided", "Put Get Rget Accumulate Get_accumulate Fetch_and_op Compare_and_swap Flush Flush_all", "win"),
    ("One-sided", "fetch start_fetch", "parameters inner"),
    ("One-sided", "push", "gradients inner"),
    ("One-sided", "draw", "tickets"),
    ("One-sided", "claim publish snapshot has_changed mark_done", "queue work_queue"),
)
_WORD_OF = {
    (call, on): word for word, calls, names in COMMUNICATING for call in calls.split() for on in names.split(" ")
}

Documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Passage(NamedTuple):
    """A docstring, a block of comments or a Markdown file."""

    line: int  # of the file, from 1
    is_docstring: bool
    raw: str
    text: str  # of the same length: code and names of entries are replaced by underscores


def faults(source: str, path: str = "odc_mpi/module.py") -> Iterator[tuple[int, str]]:
    """Yield line and message of each fault of a file, whose path is relative to the root of the project."""
    for passage in passages(source, path):
        for pattern, instead in _rules(passage, path).items():
            for line, found in _find(pattern, passage):
                yield line, f"{found!r} -> {instead}"
    if path.startswith("odc_mpi/"):
        for node in _public_functions(ast.parse(source)):
            text, words = ast.get_docstring(node) or "", _words_of_calls(node)
            # A collective function may make one-sided calls, too.
            expected = "Collective" if "Collective" in words else "Collective|One-sided"
            missing = words and not re.search(rf"(?:^\s*|[.:;?!)]\s+)(?:{expected})\b", text, re.MULTILINE)
            if missing and text and not re.match(r"See `[\w.]+`", text):  # ruff demands the docstring
                yield node.lineno, f"{node.name}: expected a sentence that begins with {expected.replace('|', ' or ')}"


def passages(source: str, path: str) -> Iterator[Passage]:
    """Yield the docstrings and blocks of comments of a Python file, or the text of a Markdown file."""
    if path.endswith(".md"):
        text = re.sub(r"^( *)(```+|~~~+).*?^\1\2|\]\([^)\n]*\)", _blank, source, flags=re.MULTILINE | re.DOTALL)
        yield Passage(1, False, source, _without_code(text))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (raw := ast.get_docstring(node, clean=False)) is not None:
            text = re.sub(r"^[ \t]+\*{0,2}\w+(?=(?: \([^)\n]*\))?: )", _blank, raw, flags=re.MULTILINE)
            yield Passage(node.body[0].lineno, True, raw, _without_code(text))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    for _, numbered in groupby(enumerate(comments), _block):
        first, *others = (token for _, token in numbered)
        raw = "\n".join([first.string.removeprefix("#"), *(token.string.lstrip("#:") for token in others)])
        yield Passage(first.start[0], False, raw, _without_code(raw))


def _block(numbered: tuple[int, tokenize.TokenInfo]) -> tuple[int, int, bool]:
    """Return the key of a block of comments, which are consecutive, in one column, and all or none with a colon."""
    number, token = numbered
    return token.start[0] - number, token.start[1], token.string.startswith("#:")


def _rules(passage: Passage, path: str) -> dict[str, str]:
    points = {} if path == POINTS_DEFINED_IN else POINTS
    # A `#:` comment documents a name as an entry of a list does. Its text begins with the colon.
    openers = OPENERS if passage.is_docstring else ENTRIES if passage.text.startswith(":") else {}
    return FORBIDDEN | points | SPELLINGS | openers


def _find(pattern: str, passage: Passage) -> Iterator[tuple[int, str]]:
    for match in _compiled(pattern).finditer(passage.text):
        begin = match.end() - len(match[0].lstrip(" \t\n.:;?!)"))
        yield passage.line + passage.text.count("\n", 0, begin), " ".join(passage.raw[begin : match.end()].split())


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern in OPENERS:
        return re.compile(pattern, re.MULTILINE)
    return re.compile(rf"(?<![\w.])(?:{pattern})(?![\w(])".replace(" ", r"\s+"), re.IGNORECASE)


def _without_code(text: str) -> str:
    return re.sub(r"(`+)(?:(?!\n\s*\n|\1).)+\1", _blank, text, flags=re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"\S", "_", match[0])


def _public_functions(node: ast.AST) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and child.name.startswith("_"):
            continue
        if not isinstance(child, Function):
            yield from _public_functions(child)
        elif not any(re.search(r"property$|\boverride$|\.setter$", ast.unparse(name)) for name in child.decorator_list):
            yield child


def _words_of_calls(function: Function) -> set[str]:
    """Return Collective, One-sided or both for the calls of a function's own body, without functions within it."""
    words: set[str] = set()
    nodes: list[ast.AST] = [*function.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call):
            words.add(_WORD_OF.get(_call_and_receiver(node.func), ""))
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))
    return words - {""}


def _call_and_receiver(called: ast.expr) -> tuple[str, str]:
    if isinstance(called, ast.Name):
        return called.id, ""
    receiver = getattr(called, "value", None)
    name = getattr(receiver, "attr", getattr(receiver, "id", "?"))
    return getattr(called, "attr", "?"), name.lstrip("_")


def main() -> int:
    """Print all faults; 1 if there are any."""
    found = 0
    for path in sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        for line, fault in sorted(faults(path.read_text(encoding="utf-8"), name)):
            print(f"{name}:{line}: {fault}")
            found += 1
    print(f"{found} faults", file=sys.stderr)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
