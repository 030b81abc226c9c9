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


def check_evaluation(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if the evaluation settings in `values` contradict each other. The error names `source`."""
    if values.get("data.eval_path") is None:
        for key in ("data.eval_sequences", "run.eval_every", "run.eval_on_start", "run.keep_best"):
            if values.get(key):
                raise UserError(f"{source}: {key} requires data.eval_path: set it to the data to evaluate on")
    if not values.get("run.keep_best"):
        return
    saved, evaluated = (values.get(key, 0) for key in ("run.checkpoint_every", "run.eval_every"))
    if not saved or not evaluated or saved % evaluated:
        raise UserError(
            f"{source}: run.keep_best needs an evaluation of each checkpoint: expected run.checkpoint_every to be a "
            f"positive multiple of run.eval_every, got {saved} and {evaluated}"
        )


def _text(value: Any) -> str:
    return json.dumps(value).strip('"')
