"""Formatting for messages, tables and plots: sizes, durations, truncated texts, and suggestions for misspellings."""

import difflib
from collections.abc import Iterable
from typing import Any

#: Size suffixes and the numbers of bytes that they represent, in ascending order.
SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def format_size(num_bytes: int) -> str:
    """Format a number of bytes with the largest suffix (K, M or G) that leaves an integer: 65536 becomes 64K."""
    for suffix, scale in reversed(SUFFIXES.items()):
        if num_bytes % scale == 0:
            return f"{num_bytes // scale}{suffix}"
    return str(num_bytes)


def parse_size(text: str) -> int | None:
    """Convert a size such as "65536", "64K" or "2G" to bytes, where 1K is 1024. Return None for any other string."""
    scale = SUFFIXES.get(text[-1:].upper(), 1)
    digits = text if scale == 1 else text[:-1]
    return int(digits) * scale if digits.isdecimal() and digits.isascii() and len(digits) < 20 else None


def format_seconds(value: float) -> str:
    """Format a duration in seconds with a suitable unit and precision, such as "3.1 s", "0.21 ms" or "1.5 us"."""
    unit, scale = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-4 else ("us", 1e6)
    scaled = value * scale
    return f"{scaled:.0f} {unit}" if scaled >= 10 else f"{scaled:.2g} {unit}"


def format_duration(seconds: float) -> str:
    """Format a duration as "1:02:03" (hours, minutes, seconds), or as "2d 03h" if it is 48 hours or longer."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours < 48 else f"{hours // 24}d {hours % 24:02}h"


def format_quantity(key: str, value: Any) -> str:
    """Format a value in the unit that is at the end of its key: `_bytes`, `_s`, `_per_s`, or a share of 1."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {format_quantity(key, part)}" for name, part in value.items() if part
        )
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    if "bytes" in key:
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
    if key.endswith("_per_s"):
        return f"{value:,.0f}"
    if key.endswith("_s"):
        return format_duration(value) if value >= 60 else format_seconds(value) if value else "0 s"
    if key.removesuffix("_start").endswith(("_fraction", "_match", "_accuracy")):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def printable_text(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded as UTF-8, and control characters except tab and line feed."""
    return text.translate(_CONTROL).encode(errors="backslashreplace").decode()


def truncate_text(text: str, max_chars: int) -> str:
    """Truncate a string to `max_chars` characters, including the "..." that marks the truncation."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def did_you_mean(word: str, known: Iterable[str], form: str = " ({})") -> str:
    """Return a suggestion such as " (did you mean NAME?)" with the known name that is most similar to `word`.

    Return "" if no known name is similar. `form` is a format string into which "did you mean NAME?" is inserted.
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return form.format(f"did you mean {near[0]}?") if near else ""
