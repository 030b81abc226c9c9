"""The YAML dialect of configuration files: safe YAML 1.1 in which ``1e-4`` and ``-.1`` are numbers, not strings.

Duplicate keys are an error.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from odc_mpi.errors import UserError


def read_file(path: Path) -> Any:
    """Read a YAML document. Raise `UserError` if the file cannot be read or is not valid."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"{path}: expected a configuration file, got: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date like 2026-02-31
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{place}: expected YAML, got: {problem}") from None


def read_value(text: str) -> Any:
    """Parse a command line argument as YAML. Text that is blank or not valid YAML is returned unchanged."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text
    return text if text.strip() == "" else value


def write(document: Any) -> str:
    """Format a document as YAML that `read_file` converts back to an equal document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Safe loader that accepts numbers like 1e-4 and -.1, and rejects duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings which `_Loader` would read as numbers."""


# For both classes: if only the loader read 1e3 as a number, the dumper would write the string "1e3" without quotes.
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")
for _half in (_Loader, _Dumper):
    _half.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
