"""The functions of the running interpreter's standard library, as prompts and completions.

A data set that is on every machine, needs no download, and has what the project is about: sequences whose lengths are
heavy-tailed. This module finds and cuts the functions; it does not tokenise them.
"""

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_COMPLETION_CHARS = 15  # below this there is a `pass` or a `return self`, which teach nothing
MAX_CHARS = 13_000  # prompt and completion together; a handful of functions are longer

# Installed packages differ from machine to machine, and tests are long and alike.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class StdlibFunction:
    """A function in two parts.

    Attributes:
        prompt: Decorators, signature and docstring, ending in a newline.
        completion: What follows the docstring, without a newline at its end.
    """

    prompt: str
    completion: str


def functions(root: Path | None = None) -> Iterator[StdlibFunction]:
    """Yield the functions and methods with a docstring of all Python files below a folder.

    The order is that of the sorted paths, and within a file that of the source. A sample that came before (backports
    and generated code) does not come again; files that do not parse are skipped.

    Args:
        root: Folder to search; the running interpreter's standard library when None.

    Yields:
        Samples with a completion of at least `MIN_COMPLETION_CHARS` and at most `MAX_CHARS` characters in all.
    """
    seen: set[StdlibFunction] = set()
    for path in _python_files(Path(sysconfig.get_path("stdlib")) if root is None else root):
        for sample in _parse_functions(path):
            length = len(sample.prompt) + len(sample.completion)
            if len(sample.completion) >= MIN_COMPLETION_CHARS and length <= MAX_CHARS and sample not in seen:
                seen.add(sample)
                yield sample


def _python_files(folder: Path) -> Iterator[Path]:
    """Walk a folder in sorted order, without entering the excluded ones (site-packages alone can be huge)."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _EXCLUDED_FOLDERS:
                yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _parse_functions(path: Path) -> Iterator[StdlibFunction]:
    """Cut the functions out of one file; a file that does not parse has none."""
    try:
        with tokenize.open(path) as file:  # honours the coding line
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
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
    """Cut a function behind its docstring; None where there is no docstring, nothing after it, or all on one line."""
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
