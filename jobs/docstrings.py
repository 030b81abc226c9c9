"""Task for a real model: describe a Python function in one line, learned from Python's standard library.

python jobs/docstrings.py FOLDER    writes functions.jsonl, the examples, pairs.jsonl, with a wrong answer each, and
                                    prompts.jsonl, three functions of its own

The answer to a function is the first line of its docstring, which the prompt lacks. The wrong one is that of another
function.
"""

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from odc_mpi.data.readers.stdlib import functions

REQUEST = "Describe this Python function in one line."
MAX_CHARS = 800  # of a function
ANSWER_CHARS = range(15, 101)

PALINDROME = """\
def is_palindrome(text):
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]
"""
READ_LINES = """\
def read_lines(path):
    with open(path) as file:
        for line in file:
            yield line.rstrip("\\n")
"""
MEAN = """\
def mean(values):
    return sum(values) / len(values)
"""


def question(function: str) -> list[dict[str, str]]:
    """Return the messages that ask for a description."""
    return [{"role": "user", "content": f"{REQUEST}\n\n{function.rstrip()}"}]


def examples() -> Iterator[tuple[str, str]]:
    """Yield functions without their docstrings, and the first lines of these."""
    seen = set()
    for sample in functions():
        node = ast.parse(sample.prompt + sample.completion).body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        answer, _, _ = (ast.get_docstring(node) or "").partition("\n")
        signature = "\n".join(sample.prompt.split("\n")[: node.body[0].lineno - 1])
        function = f"{signature}\n{sample.completion}"
        if len(answer) in ANSWER_CHARS and len(function) <= MAX_CHARS and function not in seen:
            seen.add(function)
            yield function, answer


def main(folder: Path) -> None:
    """Write the files. The examples are shuffled, so that any part of them is of all modules."""
    found = list(examples())
    random.Random(0).shuffle(found)
    wrong = [answer for _, answer in (*found[1:], *found[:1])]
    pairs = [
        {"prompt": question(function), "chosen": answer, "rejected": other}
        for (function, answer), other in zip(found, wrong, strict=True)
        if answer != other
    ]
    rows = [{"messages": [*question(function), {"role": "assistant", "content": answer}]} for function, answer in found]
    prompts = [{"messages": question(function)} for function in (PALINDROME, READ_LINES, MEAN)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("functions", rows), ("pairs", pairs), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
