"""Formats of records: the fields that each requires and uses, and the names that a source has for them."""

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from odc_mpi.data.records.fields import LOSS_FLAGS, MAX_CHARS, InvalidRecordError, field_names
from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

ANSWERS = ("chosen", "rejected")
#: Fields that extend the messages or texts of a record: earlier turns, the system prompt, definitions of tools.
BESIDE = ("history", "system", "tools")
#: Fields that may contain the prompt of a pair. Without them, the prompt is the beginning that both answers share.
_PROMPTS = ("prompt", "conversations", "instruction")
_PLAIN_FORMATS = (("messages",), ("prompt", "completion"), ("conversations",), ("instruction", "output"), ("text",))
#: Record formats, each given by its required fields. The first format whose fields are all present is used.
FORMATS = (*((name, *ANSWERS) for name in _PROMPTS), ANSWERS, *_PLAIN_FORMATS)
_OPTIONAL = ("input", "label", *BESIDE)
#: Labels of answers: whether they are desirable. Text is from CSV.
_LABELS = {"true": True, "false": False}
#: Fields that may contain messages, also as JSON text, because table cells contain only text.
WITH_MESSAGES = ("messages", "conversations", "prompt", "completion", *ANSWERS)
#: Fields of records and messages that say where the data come from. They are neither used nor reported.
METADATA = frozenset(
    (
        *("id", "_id", "ids", "idx", "index", "uuid", "uid", "hash", "key", "row_id", "prompt_id", "conversation_id"),
        *("message_id", "turn_id", "parent_id", "__index_level_0__", "source", "data_source", "dataset", "split"),
        *("url", "license", "timestamp", "created", "created_at", "date", "meta", "metadata"),
    )
)
#: Names that a source uses for fields of this module. Maps each renamed field to its name in the source, such as
#: ``{"prompt": "question"}``. If required fields are renamed, only formats that require all of them are accepted.
Columns = Mapping[str, str]


def check_columns(columns: Columns) -> None:
    """Raise a `UserError` if a field is unknown or has an empty name, or if no format contains all renamed fields."""
    known = list(dict.fromkeys((*itertools.chain(*FORMATS), *_OPTIONAL)))
    for name, source in columns.items():
        if name not in known or not source:
            raise UserError(
                f"--columns: expected FIELD=NAME with a field among {', '.join(known)}, got "
                f"{truncate_text(f'{name}={source}', MAX_CHARS)}"
            )
    if not _formats(columns):
        raise UserError(f"--columns: expected fields of one format, got {', '.join(columns)}")


def rename(record: Mapping[str, Any], location: str, columns: Columns) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the required fields of a record's format, and the record with the names that this module expects.

    The fields are () if the record has no format. If a required field is renamed, the record contains only the optional
    fields and those of the format. Raises an `InvalidRecordError` if such a record lacks a field.
    """
    if not columns:
        return _find_format(record, FORMATS), record
    renamed = {name: value for name, value in record.items() if name not in columns}
    renamed |= {name: record[source] for name, source in columns.items() if source in record}
    formats = _formats(columns)
    required = _find_format(renamed, formats)
    if formats == list(FORMATS):
        return required, renamed
    if not required:
        missing = min(([name for name in each if name not in renamed] for each in formats), key=len)[0]
        source = columns.get(missing, missing)
        raise InvalidRecordError(
            f"{location}: expected the field {source!r}, got {field_names(record)}: change --columns"
        )
    return required, {name: value for name, value in renamed.items() if name in (*required, *_OPTIONAL)}


def _formats(columns: Columns) -> list[tuple[str, ...]]:
    renamed = columns.keys() - set(_OPTIONAL)
    return [required for required in FORMATS if renamed <= set(required)]


def _find_format(fields: Container[str], formats: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return next((required for required in formats if all(name in fields for name in required)), ())


def ignored_fields(record: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the names of a record's fields that `parse_example` does not use, except empty ones and `METADATA`."""
    required, renamed = rename(record, "", columns)
    used = [*required, *(("input",) if "instruction" in required else ()), *(BESIDE if required != ("text",) else ())]
    if required == ("prompt", "completion") and read_label(renamed) is not None:
        used.append("label")
    known = METADATA.union(columns.get(name, name) for name in used)
    return [name for name, value in record.items() if name not in known and value not in (None, "", [], {})]


def read_label(record: Mapping[str, Any]) -> bool | None:
    """Return whether a record's answer is desirable, or None if it has no field `label` that is a boolean."""
    label = record.get("label")
    return label if isinstance(label, bool) else _LABELS.get(label.lower()) if isinstance(label, str) else None


def check_loss_fields(record: Mapping[str, Any], location: str) -> None:
    """Raise an `InvalidRecordError` if a record has one of `LOSS_FLAGS` that would exclude text from the loss."""
    for name, value in record.items():
        if name in LOSS_FLAGS and (isinstance(value, list | dict) or value in (False, "0", "false", "False")):
            raise InvalidRecordError(
                f"{location}: expected {name!r} in messages only, got it at the top level of the record: set 'weight' "
                "or 'train' in each message, or remove the field"
            )
