"""Files of records, and the examples in them."""

import json

from odc_mpi.data.records.parse import parse_example


def write_lines(path, *records):
    """Write records as JSON lines, and return the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parse_blocks(blocks, columns=None):
    return [parse_example(value, location, columns) for block in blocks for location, value in block.records()]
