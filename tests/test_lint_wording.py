"""The lint of the wording finds each kind of fault. What it must accept is seen on the whole package."""

import pytest
from lint_wording import faults


@pytest.mark.parametrize(
    ("docstring", "words"),
    [
        ("Fetch a unit. Local.", "'Local'"),
        ("Fetch a unit.\n\n    Local from any thread.\n    ", "'Local'"),
        ("Return what is fetched.", "'Return what'"),
        ("Return whether it is fetched.", "'Return whether it'"),
        ("Whether it is fetched.", "'Whether'"),
        ("Fetch.\n\n    Returns:\n        units: They.\n    ", "'units: They.'"),
        ("Fetch.\n\n    Args:\n        dtype: Of the units.\n    ", "'dtype: Of'"),
        ("Fetch.\n\n    Args:\n        dtypes (list): Of the units.\n    ", "'dtypes (list): Of'"),
        ("Fetch what is\n    told.", "'told'"),
        ("Learn about sums at\n    home.", "'at home'"),
        ("Fetch. Making one is local.", "'Making one is local'"),
        ("Fetch at N, not after N steps.", "'at N'"),
        ("Tokenise the text.", "'Tokenise'"),
    ],
)
def test_faults_of_docstrings_are_found(docstring, words):
    for head in ("def f():", "class A:\n  def f():", "class A:", ""):
        [(_, fault)] = faults(f'{head}\n    """{docstring}"""' if head else f'"""{docstring}"""')
        assert words in fault


@pytest.mark.parametrize(
    ("call", "word"), [("with self._world.split(1): pass", "Collective"), ("x = [self._window.get(1)]", "One-sided")]
)
def test_communicating_functions_are_marked(call, word):
    source = f'class A:\n  def f(self):\n    """Do it{{}}."""\n    {call}'
    assert [line for line, _ in faults(source.format(""))] == [2]
    assert list(faults(source.format(f". {word}"))) == list(faults(source.format(". Collective"))) == []
    assert len(list(faults(source.format(f" in {word} ways")))) == 1
    assert (list(faults(source.format(". One-sided"))) == []) == (word == "One-sided")
    assert list(faults(source.format(""), "tests/test_it.py")) == []


DOCSTRING = 'def f():\n    """Fetch.\n\n    Args:\n        x: Of the units,\n            anew.\n    """\n'
COMMENTS = "x = 1  # fine\n\n# The sum\n# at\n# home.\n#: Of units, at\n#: home.\ny = 2  # anew\n"
MARKDOWN = "# Told\n\n```\ntold\n```\n\nA `name` in\nvain, before A.\n"


@pytest.mark.parametrize(
    ("source", "path", "lines"),
    [
        (DOCSTRING, "odc_mpi/module.py", [5, 6]),
        (COMMENTS, "odc_mpi/module.py", [4, 6, 6, 8]),
        (MARKDOWN, "docs/windows.md", [1, 7, 8]),
        (MARKDOWN, "docs/ordering.md", [1, 7]),
    ],
)
def test_faults_are_found_at_their_line(source, path, lines):
    assert [line for line, _ in sorted(faults(source, path))] == lines
