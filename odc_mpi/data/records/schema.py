"""Formats of records, and the fields of each."""

import itertools
from collections.abc import Mapping
from typing import Any

from odc_mpi.data.records.fields import MAX_CHARS, InvalidRecordError, field_names
from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

#: Record formats, each given by its required fields. The first format whose fields are all present is used.
_PLAIN_FORMATS = (("messages",), ("prompt", "completion"), ("conversations",), ("instruction", "output"), ("text",))
#: Fields that may contain the prompt of a pair. Without them, the prompt is the beginning that both answers share.
_PROMPTS = ("prompt", "conversations", "instruction")
ANSWERS = ("chosen", "rejected")
FORMATS = (*((name, *ANSWERS) for name in _PROMPTS), ANSWERS, *_PLAIN_FORMATS)
OPTIONAL = ("input", "system", "tools")
#: Fields that may contain messages, also as JSON text, because table cells contain only text.
WITH_MESSAGES = ("messages", "conversations", "prompt", "completion", *ANSWERS)
#: Names that a source uses for fields of this module. Maps each renamed field to its name in the source, such as
#: ``{"prompt": "question"}``. If required fields are renamed, only formats that require all of them are accepted.
Columns = Mapping[str, str]


def check_columns(columns: Columns) -> None:
    """Raise a `UserError` if a field is unknown or has an empty name, or if no format contains all renamed fields."""
    known = list(dict.fromkeys((*itertools.chain(*FORMATS), *OPTIONAL)))
    for name, source in columns.items():
        if name not in known or not source:
            raise UserError(
                f"--columns: expected FIELD=NAME with a field among {', '.join(known)}, got "
                f"{truncate_text(f'{name}={source}', MAX_CHARS)}"
            )
    if not _formats(columns):
        raise UserError(f"--columns: expected fields of one format, got {', '.join(columns)}")


def rename(record: Mapping[str, Any], location: str, columns: Columns) -> Mapping[str, Any]:
    """Return a record in which the renamed fields have the names that this module expects.

    If a required field is renamed, the result contains only the optional fields and those of the first accepted format
    that is complete. Raises an `InvalidRecordError` if no accepted format is complete.
    """
    renamed = {name: value for name, value in record.items() if name not in columns}
    renamed |= {name: record[source] for name, source in columns.items() if source in record}
    if (formats := _formats(columns)) == list(FORMATS):
        return renamed
    missing = [[name for name in required if name not in renamed] for required in formats]
    fewest = min(missing, key=len)
    if fewest:
        source = columns.get(fewest[0], fewest[0])
        raise InvalidRecordError(
            f"{location}: expected the field {source!r}, got {field_names(record)}: change --columns"
        )
    required = formats[missing.index(fewest)]
    return {name: value for name, value in renamed.items() if name in (*required, *OPTIONAL)}


def _formats(columns: Columns) -> list[tuple[str, ...]]:
    renamed = columns.keys() - set(OPTIONAL)
    return [required for required in FORMATS if renamed <= set(required)]
