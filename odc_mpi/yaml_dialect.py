"""YAML dialect of configuration files: safe YAML 1.1 in which ``1e-4`` and ``-.1`` are numbers, not strings.

Duplicate keys are an error. The sizes of files and values are limited to far more than any configuration needs, so a
file of another kind, or one whose aliases expand endlessly, is rejected within a second.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from odc_mpi.errors import UserError

_NOT_UTF8 = re.compile("[\0\ud800-\udfff]")
#: Limits of a document: file size in bytes, number of keys and values after aliases are expanded, and nesting depth.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1 << 20, 10_000, 50


def read_file(path: Path) -> Any:
    """Read a YAML document from a regular file, or from a pipe that the shell creates for ``--config <(...)``.

    Returns None if the document is empty.

    Raises:
        UserError: The file cannot be read, is a device or a named pipe, does not contain exactly one valid document, or
            exceeds `MAX_BYTES`, `MAX_VALUES` or `MAX_DEPTH`.
    """
    content = _read(path)
    try:
        return yaml.load(content.decode(), Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date like 2026-02-31
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        raise UserError(f"{place}: expected YAML, got: {' '.join(problem.split())}") from None


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        # Opening a named pipe waits for a writer, perhaps forever.
        if stat.S_ISFIFO(mode) and not os.path.realpath(path).startswith(("/proc/", "/dev/fd/")):
            raise UserError(f"{path}: expected a configuration file, got a named pipe")
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise UserError(f"{path}: expected a configuration file, got a device")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: expected a configuration file, got: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: expected a configuration file of at most {MAX_BYTES} bytes, got more")
    return content


def read_value(text: str) -> Any:
    """Parse a command-line argument as YAML. Text that is blank, invalid or beyond a limit is returned unchanged."""
    try:
        return yaml.load(text, Loader=_Loader) if text.strip() else text
    except (yaml.YAMLError, ValueError):
        return text


def is_utf8(text: str) -> bool:
    """Return True if a string contains neither NUL nor lone surrogates, so that it can be stored as UTF-8."""
    return not _NOT_UTF8.search(text)


def write(document: Any) -> str:
    """Format a document as YAML that `read_file` converts back to an equal document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Safe loader that reads 1e-4 and -.1 as numbers, and rejects duplicate keys and values beyond the limits."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._num_values = 0
        self._num_values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, before = self.peek_event().start_mark, self._num_values
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        self._require(self._depth <= MAX_DEPTH, f"more than {MAX_DEPTH} levels of nesting", mark)
        node: Any = super().compose_node(parent, index)
        self._require(not is_alias or node in self._num_values_of, "an alias of a value that contains it", mark)
        self._num_values += self._num_values_of[node] if is_alias else 1
        limit = f"more than {MAX_VALUES} keys and values, counting those of aliases"
        self._require(self._num_values <= MAX_VALUES, limit, mark)
        if isinstance(node, yaml.ScalarNode):
            self._require(is_utf8(node.value), "a NUL character or half of a surrogate pair", mark)
        self._num_values_of.setdefault(node, self._num_values - before)
        self._depth -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        self._require(abs(value) < 1 << 64, "an integer of more than 64 bits", node.start_mark)
        return value

    def _require(self, condition: bool, problem: str, mark: Any) -> None:
        if not condition:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            self._require(key.value not in seen, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings that `_Loader` would read as numbers."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
# For both classes: if only the loader read 1e3 as a number, the dumper would write the string "1e3" without quotes.
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")
for _half in (_Loader, _Dumper):
    _half.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
