import ast
import json
from pathlib import Path

import docstrings
import pytest

from odc_mpi.data.readers import stdlib
from odc_mpi.data.readers.stdlib import StdlibFunction, functions

BODY = "return argument_one + 1"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_cuts_behind_the_docstring_and_dedents(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.py",
        "class C:\n"
        "    @staticmethod\n"
        "    async def f(\n"
        "        x,\n"
        "    ):\n"
        '        """Say what.\n'
        "\n"
        "        More.\n"
        '        """\n'
        "        # a comment\n"
        "        text = '''\n"
        "flush left'''\n"
        "        return x + text\n"
        "\n"
        "    y = 1\n",
    )
    assert list(functions(tmp_path)) == [
        StdlibFunction(
            prompt='@staticmethod\nasync def f(\n    x,\n):\n    """Say what.\n\n    More.\n    """\n',
            completion="    # a comment\n    text = '''\nflush left'''\n    return x + text",
        )
    ]


def test_form_feeds_end_no_line(tmp_path: Path) -> None:
    write(tmp_path, "a.py", f'x = 1\n\f\ndef f():\n    "Doc."\n    {BODY}\n')
    assert list(functions(tmp_path)) == [StdlibFunction('def f():\n    "Doc."\n', f"    {BODY}")]


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
def test_leaves_out(tmp_path: Path, text: str) -> None:
    write(tmp_path, "a.py", text)
    write(tmp_path, "b.py", f'def good():\n    "Doc."\n    {BODY}\n')
    assert [sample.prompt for sample in functions(tmp_path)] == ['def good():\n    "Doc."\n']


def test_skips_folders_and_repetitions(tmp_path: Path) -> None:
    root = tmp_path / "test"  # a name above the root does not count
    for folder in (
        "site-packages/x",
        "dist-packages",
        "p/test",
        "p/tests",
        "idlelib/idle_test",
        "__pycache__",
        "p",
        "q",
    ):
        write(root, f"{folder}/a.py", f'def f{len(folder)}():\n    "Doc."\n    {BODY}\n')
    assert [sample.prompt for sample in functions(root)] == ['def f1():\n    "Doc."\n']


def test_the_running_standard_library(stdlib_samples: list[StdlibFunction]) -> None:
    samples = stdlib_samples
    assert 5_000 < len(samples) < 10_000
    assert len(set(samples)) == len(samples)
    lengths = sorted(len(sample.prompt) + len(sample.completion) for sample in samples)
    assert lengths[-1] <= stdlib.MAX_CHARS
    assert lengths[-1] > 10 * lengths[len(lengths) // 2], "expected a heavy tail"
    for sample in samples[::10]:
        function = ast.parse(sample.prompt + sample.completion).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is not None and len(function.body) > 1
        alone = ast.parse(sample.prompt).body[0]
        assert isinstance(alone, ast.FunctionDef | ast.AsyncFunctionDef) and len(alone.body) == 1


def test_the_task_of_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of `make run` have the function without its docstring, and the first line of that as the answer.

    The wrong answer of a pair is that of another function.
    """
    kept = StdlibFunction(
        '@cache\ndef f(x):\n    """Return twice the value.\n\n    More.\n    """\n', "    return 2 * x"
    )
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
