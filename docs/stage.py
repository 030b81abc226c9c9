"""Copy the manual to a folder and generate the reference of settings, metrics, commands and Python; `make docs`.

    python docs/stage.py build/manual

The folder then has mkdocs.yml and docs/. The reference comes from the dataclasses of the settings, the parser of the
command line, the metrics that callbacks declare, and the docstrings of the public names.
"""

import argparse
import dataclasses
import importlib
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import odc_mpi
import odc_mpi.training
from odc_mpi.cli.main import parser
from odc_mpi.observe.callback import Callback
from odc_mpi.observe.metrics import GROUPS
from odc_mpi.setting_types import format_value, type_signature
from odc_mpi.training.parsing import aliases
from odc_mpi.training.preferences.pairs import PairScorer
from odc_mpi.training.settings import Config

ROOT = Path(__file__).parents[1]
#: Names of the reference beside those of the package root, by topic.
PYTHON = {
    "For loops of your own": (
        "odc_mpi.api.decide_for",
        "odc_mpi.shard.minibatch_stats.MinibatchStats",
    ),
    "For loading and generating": (
        "odc_mpi.models.load.load_model",
        "odc_mpi.generation.generate.generate",
        "odc_mpi.generation.generate.SamplingParams",
    ),
    "For objectives, metrics and callbacks": (
        "odc_mpi.observe.callback.Callback",
        "odc_mpi.observe.callback.Step",
        "odc_mpi.training.loop.Objective",
    ),
}


def stage(folder: Path) -> None:
    """Write the configuration, the pages, the notes and the reference below an empty folder."""
    pages = folder / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "*.yml", "__pycache__"))
    shutil.copytree(ROOT / "benchmarks" / "notes", pages / "notes")
    (pages / "jobs").mkdir()
    for path in ROOT.glob("jobs/*.yaml"):
        shutil.copy(path, pages / "jobs")
    for page in pages.glob("*.md"):
        page.write_text(re.sub(r"\]\(\.\./(?:benchmarks/)?(notes|jobs)/", r"](\1/", page.read_text()))
    (pages / "reference").mkdir()
    for name, lines in (
        ("settings", settings()),
        ("metrics", metrics()),
        ("commands", commands()),
        ("python", python()),
    ):
        (pages / "reference" / f"{name}.md").write_text("\n".join(lines) + "\n")
    shutil.copy(ROOT / "docs" / "mkdocs.yml", folder)


def metrics() -> Iterator[str]:
    """Yield the page of all metrics that callbacks declare, a table for each group."""
    yield from ("# Metrics", "", "In the files of a run directory. [More about some of them](../metrics.md).")
    # Recipes import their callbacks only when they build a run.
    for module in pkgutil.walk_packages(odc_mpi.training.__path__, "odc_mpi.training."):
        importlib.import_module(module.name)
    labels: dict[tuple[str, ...], list[str]] = {}
    kinds: list[type] = [Callback, PairScorer]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for metric in getattr(kind, "metrics", ()):
            key = "" if metric.summary == "end" else f"`{metric.key}`"
            same = labels.setdefault((metric.group, key, ", ".join(f"`{entry}`" for entry in metric.entries)), [])
            same += [metric.label] if metric.label not in same else []
    for group in GROUPS:
        rows = [(*keys, "; ".join(texts)) for (in_group, *keys), texts in labels.items() if in_group == group]
        yield from ("", f"## {group}", "", *_table(("metrics.jsonl", "summary.json", "meaning"), rows))


def settings() -> Iterator[str]:
    """Yield the page of all settings, a table for each section."""
    yield from (
        "# Settings",
        "",
        "For `odc-mpi train` and `odc-mpi job`: in a YAML file by section, or as `--section.key value`.",
    )
    for name, section in get_type_hints(Config).items():
        hints = get_type_hints(section, include_extras=True)
        yield from ("", f"## {name}", "", _paragraph(section.__doc__ or ""), "")
        rows = []
        for item in dataclasses.fields(section):
            hint, meaning, *_ = get_args(hints[item.name])
            required = item.default is dataclasses.MISSING
            default = "required" if required else f"`{format_value(item.default).strip(chr(34))}`"
            rows.append(
                (
                    f"`{name}.{item.name}`",
                    f"`{type_signature(hint)}`".replace(" | ", "` or `"),
                    default,
                    _with_links(meaning),
                )
            )
        yield from _table(("setting", "type", "default", "meaning"), rows)

    yield from ("", "## Names of other libraries", "", "Accepted, since they mean the same:", "")
    names: dict[str, list[str]] = {}
    for name, setting in aliases.ALIASES.items():
        names.setdefault(setting, []).append(f"`{name}`")
    yield from _table(("setting", "also"), [(f"`{setting}`", ", ".join(also)) for setting, also in names.items()])
    yield from ("", "Answered with what to set instead (regular expressions of names):", "")
    yield from _table(("names", "answer"), [(", ".join(_alternatives(each)), text) for each, text in aliases._ANSWERS])


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a pattern that are not in parentheses, as code."""
    for alternative in re.split(r"\|(?![^(]*\))", pattern):
        yield f"`{alternative}`".replace("|", "/")


def commands() -> Iterator[str]:
    """Yield the page of all commands and their options."""
    yield from ("# Commands", "", "```text", *parser().format_help().rstrip().splitlines(), "```")
    yield from _commands(parser(), "odc-mpi", 2)


def _commands(command: argparse.ArgumentParser, name: str, level: int) -> Iterator[str]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, child in action.choices.items():
                title = f"{name} {word}"
                yield from ("", f"{'#' * level} {title}", "", _sentence(helps.get(word, "")), "")
                if not any(isinstance(each, argparse._SubParsersAction) for each in child._actions):
                    yield from ("```text", *child.format_usage().rstrip().splitlines(), "```", "")
                    yield from _options(child)
                yield from _commands(child, title, level + 1)


def _options(command: argparse.ArgumentParser) -> Iterable[str]:
    rows = []
    for action in command._actions:
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or ("/".join(map(str, action.choices)) if action.choices else action.dest.upper())
        value = str(value).replace("|", "/")
        name = ", ".join(action.option_strings) or value
        value = f" {value}" if action.option_strings and action.nargs != 0 else ""
        rows.append((f"`{name}{value}`", (action.help or "").replace("%%", "%")))
    return _table(("argument", "meaning"), rows) if rows else ()


def python() -> Iterator[str]:
    """Yield the page of the Python interface, which mkdocstrings fills from the docstrings."""
    yield from (
        "# Python",
        "",
        _paragraph(odc_mpi.__doc__ or ""),
        "",
        "`import odc_mpi` has the names of this section.",
        "",
    )
    for name, module in odc_mpi._PUBLIC.items():
        yield from (f"::: {module}.{name}", "")
    for title, names in PYTHON.items():
        yield from (f"## {title}", "")
        for name in names:
            module, _, last = name.rpartition(".")
            yield from (f"::: {name}", "", f"*`from {module} import {last}`*", "")


def _with_links(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", text)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (titles, ["---"] * len(titles), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in row) + " |"


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
