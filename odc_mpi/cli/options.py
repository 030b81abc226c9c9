"""What options of several commands are read with."""

import argparse

from odc_mpi.formatting import parse_size
from odc_mpi.models.attention_names import SUPPORTED, unsupported_reason

#: No count and no number of seconds is larger: what is, was a slip, and not every system call takes it.
MAX_VALUE = 10**9
#: Of --base, where adapters are read.
BASE_HELP = "adapters: the directory in which their base is now; default: where the run had it"


def positive_int(text: str) -> int:
    """Read a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= MAX_VALUE):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, at most {MAX_VALUE:,}, got {text!r}")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Read a size in bytes."""
    num_bytes = parse_size(text)
    if num_bytes is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 0, got {text!r}")
    return num_bytes


def attention_name(text: str) -> str:
    """Read the name of an attention that is served."""
    if text not in SUPPORTED:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(SUPPORTED)}, got {text!r}{unsupported_reason(text)}")
    return text


def step_seconds(text: str) -> float:
    """Read the seconds of a step."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 3600:  # not a number is neither
        raise argparse.ArgumentTypeError(f"expected seconds from 0.001 to 3600, got {text!r}")
    return seconds
