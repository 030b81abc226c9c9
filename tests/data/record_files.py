"""Files of records, and the examples in them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from odc_mpi.data.examples import Columns, parse_example
from odc_mpi.data.readers.records import Block


def write_lines(path: Path, *records: Any) -> str:
    """Write records as JSON lines, and return the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parse_blocks(blocks: Iterable[Block], columns: Columns | None = None) -> list[Any]:
    return [parse_example(value, location, columns) for block in blocks for location, value in block.records()]
