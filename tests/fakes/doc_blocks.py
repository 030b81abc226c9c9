"""Blocks of code in README.md and docs/, in the order of their page.

`sh` and `python` blocks are executed by tests/launch/commands/test_doc_blocks.py. `console` blocks, for clusters, GPUs,
downloads and benchmarks that take minutes, are only parsed.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = ("sh", "python")


class Block(NamedTuple):
    kind: str  # the language of the fence; "" for output
    text: str
    line: int  # of the fence in the file, from 1


def blocks(page):
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [
        Block(
            match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE), text.count("\n", 0, match.start()) + 1
        )
        for match in found
    ]


def commands(block):
    """Return the commands of a shell block, each on one line, without comments and `make`."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith(("#", "make "))]
