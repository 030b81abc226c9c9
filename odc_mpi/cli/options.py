"""Types of command-line options that several commands share."""

import argparse

from odc_mpi.formatting import parse_size
from odc_mpi.models.attention_names import SUPPORTED, unsupported_reason

#: Larger counts and seconds are typos, and not every system call accepts them.
MAX_VALUE = 10**9
BASE_HELP = "for adapters: directory of their base model; default: its directory in the training run"


def positive_int(text: str) -> int:
    """Parse an integer above 0."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= MAX_VALUE):
        raise argparse.ArgumentTypeError(f"expected an integer above 0, at most {MAX_VALUE:,}, got {text!r}")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Parse a size in bytes."""
    num_bytes = parse_size(text)
    if num_bytes is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 0, got {text!r}")
    return num_bytes


def attention_name(text: str) -> str:
    """Parse the name of a supported attention implementation."""
    if text not in SUPPORTED:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(SUPPORTED)}, got {text!r}{unsupported_reason(text)}")
    return text


def step_seconds(text: str) -> float:
    """Parse the seconds of a step."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 3600:  # nan fails both comparisons
        raise argparse.ArgumentTypeError(f"expected seconds from 0.001 to 3600, got {text!r}")
    return seconds
