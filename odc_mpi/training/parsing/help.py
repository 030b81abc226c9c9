"""Help text of the settings, for ``odc-mpi train --help``."""

import textwrap
from collections.abc import Mapping
from dataclasses import MISSING

from odc_mpi.errors import UserError
from odc_mpi.training.parsing.aliases import ALIASES
from odc_mpi.training.setting_types import Setting, format_value, type_signature

_WIDTH, _INDENT = 100, 34
#: Section of the help with names of other libraries, which is not a section of the settings.
NAMES = "names"


def help_text(settings: Mapping[str, Setting], titles: Mapping[str, str], section: str = "") -> str:
    """Return the help of all settings, or of the section `section` or `NAMES`, at most 100 columns wide.

    `titles` has the description of each section. Raises `UserError` if there is no such section.
    """
    if section == NAMES:
        return _columns("Names of transformers, TRL, peft, axolotl and torchtitan that are accepted, too:", ALIASES)
    if section and section not in titles:
        raise UserError(f"--help: expected one of {', '.join([*titles, NAMES])}, got {section}")
    parts = []
    for name, title in titles.items():
        if section in ("", name):
            rows = {key: _describe(each) for key, each in settings.items() if key.startswith(f"{name}.")}
            parts.append(_columns(f"{name}: {title}", rows))
    return "\n\n".join(parts)


def _describe(setting: Setting) -> str:
    default = "required" if setting.default is MISSING else f"default: {format_value(setting.default)}"
    return f"{setting.help}\n({type_signature(setting.type)}; {default})".replace('"', "")


def _columns(title: str, rows: Mapping[str, str]) -> str:
    lines = textwrap.wrap(title, _WIDTH)
    for name, text in rows.items():
        width = _WIDTH - _INDENT
        wrapped = [line for part in text.split("\n") for line in textwrap.wrap(part, width, break_on_hyphens=False)]
        lines.append(f"  {name:<{_INDENT - 3}} {wrapped[0]}")
        lines += [" " * _INDENT + line for line in wrapped[1:]]
    return "\n".join(lines)
