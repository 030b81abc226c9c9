"""Functions of the Python standard library, as prompts and completions with a heavy-tailed length distribution."""

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MIN_COMPLETION_CHARS = 15  # excludes `pass` and `return self`
MAX_CHARS = 13_000  # prompt and completion together; only a few functions are longer

# Installed packages differ between machines, and tests are long and repetitive.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class StdlibFunction(NamedTuple):
    """A function, split after its docstring. The prompt ends in a newline."""

    prompt: str
    completion: str


def functions(root: Path | None = None) -> Iterator[StdlibFunction]:
    """Yield the functions and methods with docstrings in a folder's Python files, ordered by path and line.

    Duplicates, files that cannot be parsed, functions longer than `MAX_CHARS` characters, and completions shorter than
    `MIN_COMPLETION_CHARS` characters are omitted. The folder `root`, by default the standard library of the running
    interpreter, is searched recursively, except for tests and installed packages.
    """
    seen: set[StdlibFunction] = set()
    for path in _python_files(Path(sysconfig.get_path("stdlib")) if root is None else root):
        for sample in _parse_functions(path):
            length = len(sample.prompt) + len(sample.completion)
            if len(sample.completion) >= MIN_COMPLETION_CHARS and length <= MAX_CHARS and sample not in seen:
                seen.add(sample)
                yield sample


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of Python files in sorted order. Excluded folders, which can be huge, are not visited."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _EXCLUDED_FOLDERS:
                yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _parse_functions(path: Path) -> Iterator[StdlibFunction]:
    try:
        with tokenize.open(path) as file:  # respects the encoding declaration
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for invalid escapes in those files
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.split("\n")  # not splitlines(): form feeds do not end a line for ast
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        sample = _split_function(node, lines)
        if sample is not None:
            yield sample


def _split_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> StdlibFunction | None:
    """Split a function after its docstring. Returns None if it has no docstring, or no code on later lines."""
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    docstring_end = node.body[0].end_lineno
    if docstring_end is None or node.body[1].lineno == docstring_end:
        return None
    indent = lines[first - 1][: node.col_offset]
    dedented = [line.removeprefix(indent) for line in lines[first - 1 : node.end_lineno]]
    first_body_line = docstring_end - first + 1
    return StdlibFunction("\n".join(dedented[:first_body_line]) + "\n", "\n".join(dedented[first_body_line:]))
