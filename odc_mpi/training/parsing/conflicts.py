"""Combinations of settings that are not supported, declared beside the setting that excludes the others."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from odc_mpi.errors import UserError

#: Supported values of settings, with the reason why others are not supported.
Allowed: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True)
class Conflicts:
    """Settings of which only the values in `allowed` are supported if `applies_to` holds for that of `setting`."""

    setting: str
    applies_to: Callable[[Any], bool]
    allowed: Allowed


def check_conflicts(declared: Iterable[Conflicts], settings: Mapping[str, Any], source: str) -> None:
    """Raise a `UserError` that names `source` for the first conflict in `settings`, all values keyed by setting."""
    for conflicts in declared:
        value = settings[conflicts.setting]
        if not conflicts.applies_to(value):
            continue
        for setting, (allowed, reason) in conflicts.allowed.items():
            if settings[setting] not in allowed:
                raise UserError(
                    f"{source}: {setting}: expected {' or '.join(map(_text, allowed))} with {conflicts.setting} "
                    f"{_text(value)}, got {_text(settings[setting])}: {reason}"
                )


def _text(value: Any) -> str:
    return json.dumps(value).strip('"')
