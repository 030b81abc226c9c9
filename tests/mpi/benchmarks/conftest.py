"""Programs that run on the ranks of the tests."""

import json
import sys
from importlib import import_module

import pytest


@pytest.fixture
def run(world, base, monkeypatch, capsys):
    """`run(name, *words)` runs a program in an empty directory; returns what rank 0 prints on both streams."""

    def start(name, *words):
        if world.rank == 0:
            base.mkdir(exist_ok=True)
        world.gather_objects(None)
        monkeypatch.chdir(base)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        assert not import_module(name).main()
        assert world.gather_objects(None) and not list(base.iterdir()), "a benchmark leaves no run behind"
        return world.gather_objects(capsys.readouterr())[0]

    return start


@pytest.fixture
def printed(run):
    return lambda *words: json.loads(run(*words).out.splitlines()[-1])
