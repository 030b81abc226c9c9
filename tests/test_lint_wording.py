"""The lint of the wording finds each kind of fault. What it must accept is seen on the whole package."""

import pytest
from lint_wording import faults

FAULTS = {
    "Fetch. Local.\n\n    Args:\n        dtypes (list): Of the units.\n    ": ". Local;dtypes (list): Of",
    "Return whether it is\n    told, not `told`. Tokenise.": "Return whether it;told;Tokenise",
}


@pytest.mark.parametrize("word", ["Collective", "One-sided"])
def test_faults_are_found(word):
    call = "world.split(1)" if word == "Collective" else "window.get(1)"
    source = f'class A:\n  def f(self):\n    """{{}}"""\n    x = [self._{call}]  # {{}}\n'
    for docstring, words in FAULTS.items():
        found = [fault.strip(" '") for _, fault in faults(source.format(f"{docstring} {word}.", ""))]
        assert sorted(found) == sorted(words.split(";"))
    assert [line for line, _ in faults(source.format("Do it.", ""))] == [2]
    assert list(faults(source.format(f"Do it. {word}.", ""))) == list(faults(source.format("Collective.", ""))) == []
    assert [line for line, _ in faults(source.format("Do it. Collective.", "learnt"))] == [4]
