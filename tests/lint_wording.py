"""What a machine can check of the wording of docstrings; part of `make lint`.

    python tests/lint_wording.py

A public function or method says who takes part: a sentence of its docstring begins with Collective, One-sided or Local.
Exempt are properties, which are local, and docstrings that refer to another one: "See `Device`."; methods that
override have none.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "odc_mpi"

_PARTICIPANTS = re.compile(r"(?:^\s*|[.:?!] )(?:Collective|One-sided|Local)\b", re.MULTILINE)
_REFERENCE = re.compile(r"See `[\w.]+`")
_RIDDLE = re.compile(r"Return (?:what|which|why|when|whether it)\b")
_EMPTY_ENTRY = re.compile(r"^\s*\w+: (?:They|Them|It|It is not|Those|This|That|The same)\.$", re.MULTILINE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(node: ast.AST, is_public: bool = True) -> Iterator[tuple[Definition, bool]]:
    """Yield functions, methods and classes, each with whether it is public; what is defined in a function is not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            is_child_public = is_public and not child.name.startswith("_")
            yield child, is_child_public
            yield from definitions(child, is_child_public and isinstance(child, ast.ClassDef))
        else:
            yield from definitions(child, is_public)


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and fault of each docstring of a module that breaks a rule."""
    for node, is_public in definitions(ast.parse(source)):
        text = ast.get_docstring(node)
        if text is None:  # ruff demands those that have to be there
            continue
        if _RIDDLE.match(text):
            yield node.lineno, f"{node.name}: say the noun: {text.splitlines()[0]!r}"
        for entry in _EMPTY_ENTRY.findall(text):
            yield node.lineno, f"{node.name}: an entry that says nothing: {entry.strip()!r}"
        if is_public and _must_say_who(node) and not (_PARTICIPANTS.search(text) or _REFERENCE.match(text)):
            yield node.lineno, f"{node.name}: expected a sentence that begins Collective, One-sided or Local"


def _must_say_who(node: Definition) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return not isinstance(node, ast.ClassDef) and not any(name.endswith("property") for name in decorators)


def main() -> int:
    """Print all complaints; 1 if there are any."""
    found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, fault in complaints(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(PACKAGE.parent)}:{line}: {fault}")
            found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
