import ast
import json

import docstrings
import pytest

from odc_mpi.data.readers import stdlib
from odc_mpi.data.readers.stdlib import StdlibFunction, functions

BODY = "return argument_one + 1"


METHOD = '''class C:
    @staticmethod
    async def f(
        x,
    ):
        """Say what.

        More.
        """
        # a comment
        text = "\\
flush left"
        return x + text

    y = 1
'''


def test_cuts_behind_the_docstring_and_dedents(tmp_path):
    (tmp_path / "a.py").write_text(METHOD)
    # A form feed does not end a line.
    (tmp_path / "b.py").write_text(f'x = 1\n\f\ndef f():\n    "Doc."\n    {BODY}\n')
    assert list(functions(tmp_path)) == [
        StdlibFunction(
            prompt='@staticmethod\nasync def f(\n    x,\n):\n    """Say what.\n\n    More.\n    """\n',
            completion='    # a comment\n    text = "\\\nflush left"\n    return x + text',
        ),
        StdlibFunction('def f():\n    "Doc."\n', f"    {BODY}"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"def f():\n    {BODY}\n",  # no docstring
        'def f():\n    "Doc."\n',  # nothing else
        'def f():\n    "Doc."\n    return 1\n',  # too little else
        f'def f(): "Doc."; {BODY}\n',  # on one line
        f'def f():\n    "Doc."\n    x = "{"y" * stdlib.MAX_CHARS}"\n',  # too long
        f'def f():\n    "Doc."\n    {BODY}\n)\n',  # does not parse
        "# -*- coding: no-such-coding -*-\n",
        "\0",
    ],
)
def test_leaves_out(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(f'def good():\n    "Doc."\n    {BODY}\n')
    assert [sample.prompt for sample in functions(tmp_path)] == ['def good():\n    "Doc."\n']


def test_skips_folders_and_repetitions(tmp_path):
    root = tmp_path / "test"  # a name above the root does not count
    excluded = ("site-packages/x", "dist-packages", "p/test", "p/tests", "idlelib/idle_test", "__pycache__")
    for folder in (*excluded, "p", "q"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "a.py").write_text(f'def f{len(folder)}():\n    "Doc."\n    {BODY}\n')
    assert [sample.prompt for sample in functions(root)] == ['def f1():\n    "Doc."\n']


def test_the_running_standard_library(stdlib_samples):
    assert 5_000 < len(stdlib_samples) < 10_000
    for sample in stdlib_samples[::10]:
        [function] = ast.parse(sample.prompt + sample.completion).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is not None and len(function.body) > 1
        [alone] = ast.parse(sample.prompt).body
        assert isinstance(alone, ast.FunctionDef | ast.AsyncFunctionDef) and len(alone.body) == 1


def test_the_task_of_docstrings(tmp_path, monkeypatch):
    """The examples of `make run` have the function without its docstring, and the first line of that as the answer.

    The wrong answer of a pair is that of another function.
    """
    text = '@cache\ndef f(x):\n    """Return twice the value.\n\n    More.\n    """\n'
    kept = StdlibFunction(text, "    return 2 * x")
    short = StdlibFunction('def g(x):\n    """Short."""\n', "    return 3 * x")
    other = StdlibFunction('def h(x):\n    """Return thrice the value."""\n', "    return 3 * x")
    monkeypatch.setattr(docstrings, "functions", lambda: iter([kept, short, kept, other]))
    docstrings.main(tmp_path)
    rows, pairs = (
        sorted(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines()), key=str)
        for name in ("functions", "pairs")
    )
    assert len(rows) == len(pairs) == 2
    question, answer = rows[0]["messages"]
    answers = "Return twice the value.", "Return thrice the value."
    assert pairs[0] == {"prompt": [question], "chosen": answers[0], "rejected": answers[1]}
    assert (pairs[1]["chosen"], pairs[1]["rejected"]) == answers[::-1]
    function = "@cache\ndef f(x):\n    return 2 * x"
    assert question == {"role": "user", "content": f"Describe this Python function in one line.\n\n{function}"}
    assert answer == {"role": "assistant", "content": "Return twice the value."}
    prompts = [json.loads(line)["messages"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 3 and {message["role"] for messages in prompts for message in messages} == {"user"}
