"""Reader for the values of settings in a YAML file and on the command line.

Names may be those of other libraries (`aliases`), may omit their section, and may contain hyphens. A single error
reports all wrong names.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from odc_mpi import yaml_dialect as dialect
from odc_mpi.errors import UserError
from odc_mpi.setting_types import Setting, format_value, is_verbatim, type_name, union_members, validate_value
from odc_mpi.training.parsing import aliases
from odc_mpi.training.recipes import RECIPES

COMMAND_LINE = "command line"  # source of `--section.key value` in errors
#: Similarity, from 0 to 1, above which a name is suggested for an unknown one.
_SIMILAR = 0.75
#: Pairs of mutually exclusive settings. The one given later replaces the other.
_EXCLUSIVE = {
    "run.steps": "run.num_train_epochs",
    "run.num_train_epochs": "run.steps",
    "optim.warmup_steps": "optim.warmup_ratio",
    "optim.warmup_ratio": "optim.warmup_steps",
}

_OBJECTIVE = "run.objective"


class _Given(NamedTuple):
    """A setting as given by the user: a value in YAML, or the words after a name on the command line."""

    source: str
    name: str
    value: Any
    words: list[str] | None = None


class Reader:
    """Reads the values of `settings` from a parsed YAML file and from command-line arguments."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = settings
        self._sections = list(dict.fromkeys(name.partition(".")[0] for name in settings))
        leaves = [name.partition(".")[2] for name in settings]
        unique = {leaf: name for leaf, name in zip(leaves, settings, strict=True) if leaves.count(leaf) == 1}
        del unique["config"]  # `--config` is the file
        #: Settings, keyed by their names without the section.
        self._by_leaf = unique | aliases.ALIASES
        #: Settings that have the same name in several sections, keyed by this name.
        self._shared = {
            leaf: [name for name in settings if name.endswith(f".{leaf}")] for leaf in {*leaves} - {*unique}
        }

    def read(self, document: Any, source: str, arguments: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, str]]:
        """Return values and their sources, by setting. `arguments` override `document`, the parsed YAML of `source`."""
        items = [*self._flatten(document, source), *split_arguments(arguments)]
        section = ""  # with the settings of the objective
        for item in items:
            if item.name in (_OBJECTIVE, _OBJECTIVE.partition(".")[2]):
                objective = item.value if item.words is None else " ".join(item.words)
                section = RECIPES[objective].section if objective in RECIPES else ""
        names = self._resolve_all(items, section)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for item, name in zip(items, names, strict=True):
            self._set(values, item, name)
            sources[self._mapping_of(name) or name] = item.source
            if values.get(name) and (other := _EXCLUSIVE.get(name)):
                values.pop(other, None)
                sources.pop(other, None)
        return values, sources

    def _flatten(self, document: Any, source: str) -> Iterator[_Given]:
        if document is not None and not isinstance(document, dict):
            got = format_value(document)
            raise UserError(f"{source}: expected a mapping of the sections {', '.join(self._sections)}, got {got}")
        for section, content in (document or {}).items():
            if isinstance(content, dict) and content:
                yield from (_Given(source, f"{section}.{name}", value) for name, value in content.items())
            elif section not in self._sections or content not in (None, {}):  # a section may be left empty
                yield _Given(source, str(section), content)

    def _resolve_all(self, given: Sequence[_Given], section: str) -> list[str]:
        names, problems, source = [], [], ""
        for item in given:
            try:
                names.append(self._resolve(item.name, section))
            except UserError as error:
                problems.append(str(error) if item.source == source else f"{item.source}: {error}")
                source = item.source
        if problems:
            raise UserError("; ".join(dict.fromkeys(problems)))
        return names

    def _resolve(self, given: str, own_section: str) -> str:
        """Return the full name of a setting, preferably in `own_section`. Raises `UserError` with a suggestion."""
        name = given.replace("-", "_")
        mapping = self._mapping_of(name)
        if mapping:
            return mapping + given[len(mapping) :]
        section, _, leaf = name.rpartition(".")
        known = self._by_leaf.get(leaf)
        shared = self._shared.get(leaf, []) if not section else []
        if f"{own_section}.{leaf}" in shared:
            return f"{own_section}.{leaf}"
        if name in self._settings:
            return name
        if known and section in ("", known.partition(".")[0]):
            return known
        instead = aliases.answer(leaf if section in ("", *self._sections) else name.partition(".")[0])
        instead = instead or aliases.answer(leaf)
        if instead and not known:
            raise UserError(f"{given}: {instead}")
        if name in self._sections:
            raise UserError(f"{name} is a section: expected a setting of it, as in {name}: {{key: value}}")
        if shared:
            raise UserError(f"{given} is a setting of several sections: write {' or '.join(shared)}")
        near = known or self._similar(section, leaf)
        raise UserError(
            f"unknown setting {given}: {f'did you mean {near}?' if near else 'odc-mpi train --help lists all'}"
        )

    def _similar(self, section: str, leaf: str) -> str | None:
        candidates = {name.partition(".")[2]: name for name in self._settings if name.startswith(f"{section}.")}
        candidates = candidates or {name.replace(".", ""): name for name in self._settings} | self._by_leaf
        near = difflib.get_close_matches(leaf, candidates, n=1, cutoff=_SIMILAR)
        return candidates[near[0]] if near else None

    def _mapping_of(self, name: str) -> str | None:
        """Return the dictionary setting with this key (`model.config` for `model.config.hidden_size`), or None."""
        mappings = (key for key, setting in self._settings.items() if dict[str, Any] in union_members(setting.type))
        return next((key for key in mappings if name.startswith(f"{key}.")), None)

    def _set(self, values: dict[str, Any], item: _Given, name: str) -> None:
        mapping = self._mapping_of(name)
        if mapping:
            keys = name.removeprefix(f"{mapping}.").split(".", dialect.MAX_DEPTH)
            value = dialect.read_value(_one_word(item, "a value")) if item.words is not None else item.value
            values[mapping] = _with_entry(values.get(mapping), item.source, mapping, keys, value)
            return
        setting, leaf = self._settings[name], item.name.replace("-", "_").rpartition(".")[2]
        value = aliases.convert(leaf, self._parse(item, leaf, setting))
        values[name] = validate_value(f"{item.source}: {name}", setting, value)

    def _parse(self, item: _Given, leaf: str, setting: Setting) -> Any:
        if item.words is None:
            return item.value
        if not item.words and (bool in union_members(setting.type) or aliases.is_flag(leaf)):
            return True
        is_list = any(str(kind).startswith("list[") for kind in union_members(setting.type))
        if is_list and len(item.words) > 1:
            text = (" " if item.words[0].startswith("[") else ",").join(item.words)
        else:
            text = _one_word(item, type_name(setting.type))
        converted = aliases.convert(leaf, value := dialect.read_value(text))
        return text if converted is value and is_verbatim(setting.type, text) else value


def split_arguments(arguments: Sequence[str]) -> list[_Given]:
    """Split ``--name value value`` and ``--name=value`` arguments.

    Raises `UserError` if the first argument is a value, or if a name is empty.
    """
    items: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, text = argument[2:].partition("=")
            items.append((name, [text] if equals else []))
        elif items:
            items[-1][1].append(argument)
        if not items or not items[-1][0]:
            raise UserError(f"{COMMAND_LINE}: expected --section.key value, got {format_value(argument)}")
    return [_Given(COMMAND_LINE, name, None, words) for name, words in items]


def _one_word(item: _Given, expected: str) -> str:
    words = item.words or []
    if not words:
        raise UserError(f"{item.source}: --{item.name} expected {expected} after it, got nothing")
    if len(words) > 1:
        raise UserError(f"{item.source}: expected --section.key value, got {format_value(words[1])}")
    return words[0]


def _with_entry(mapping: Any, source: str, key: str, names: list[str], value: Any) -> dict[str, Any]:
    if mapping is not None and not isinstance(mapping, dict):
        raise UserError(f"{source}: --{key}.{names[0]}: expected {key} to be a mapping, got {format_value(mapping)}")
    mapping = mapping or {}
    name, *deeper = names
    if deeper:
        value = _with_entry(mapping.get(name), source, f"{key}.{name}", deeper, value)
    return {**mapping, name: value}
