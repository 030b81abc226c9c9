"""Files of records, the examples in them, and records that are refused."""

import json
from functools import partial

from user_errors import refused

from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example

#: Call a function that must raise an error of a record.
invalid = partial(refused, error=InvalidRecordError)


def write_lines(path, *records):
    """Write records as JSON lines, and return the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parse_blocks(blocks, columns=None):
    return [parse_example(value, location, columns) for block in blocks for location, value in block.records()]
