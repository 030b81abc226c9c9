"""The lint for docstrings finds what it is to find, and nothing else."""

import pytest
from lint_wording import complaints

GOOD = '''
def f():
    """Fetch a unit. One-sided.

    Args:
        x: They are many.
    """
    def inner():
        """Add one."""


def g():
    """Copy a slice.

    Local: no rank waits.
    """


def _private():
    """Close the file."""


class A:
    """A file."""

    @property
    def size(self):
        """Number of bytes."""

    def use(self):
        """See `Device`."""

    def overrides(self):  # noqa: D102
        return 1


class _Hidden:
    def close(self):
        """Close the file."""
'''


def test_good_docstrings_pass():
    assert list(complaints(GOOD)) == []


@pytest.mark.parametrize(
    ("docstring", "words"),
    [
        ("Fetch a unit.", "expected a sentence"),
        ("Fetch a unit of the local shard.", "expected a sentence"),
        ("Return what is fetched. Local.", "say the noun"),
        ("Return whether it is fetched. Local.", "say the noun"),
        ("Fetch. Local.\n\n    Returns:\n        units: They.\n    ", "'units: They.'"),
    ],
)
@pytest.mark.parametrize("head", ["def f():", "class A:\n  def f():", "if True:\n  async def f():"])
def test_faults_are_found(docstring, words, head):
    [(_, fault)] = complaints(f'{head}\n    """{docstring}"""')
    assert words in fault
