"""What a job of `faulty_ranks.py` has to say, and how soon it has to end; on this machine or on two hosts."""

import re
from dataclasses import dataclass
from pathlib import Path

from mpi_launch import finish, start

PROGRAM = Path(__file__).with_name("faulty_ranks.py")
NUMBER = r"\d+\.\d"
LAST_SEEN = f"which was last seen ({NUMBER}) s ago, "
TRACEBACK = re.escape('raise KeyError("my own mistake")')


@dataclass(frozen=True)
class Fault:
    """A program, and how it ends: with all of its first line, and with what standard error has besides."""

    program: str
    line: str = ""
    says: tuple = ()
    ranks: int | str = 3
    timeout_s: float = 3
    within_s: float = 60
    seen_s: tuple = (2.0, 20.0)

    def start(self, directory, *before, begin=start):
        name, *words = self.program.split()
        return begin(self.ranks, *before, PROGRAM, name, self.timeout_s, *words, cwd=directory)

    def check(self, job):
        """Wait for the end of a job; return it, and its lines of this package."""
        done = finish(job)
        assert done.code != 0 and done.seconds < self.within_s, done
        for pattern in self.says:
            assert re.search(pattern, done.err), (pattern, done.err)
        lines = [line for line in done.err.splitlines() if line.startswith("odc_mpi: ")]
        if self.line:
            # One voice, but rather two than none.
            assert 1 <= len(lines) <= 2, done
            found = re.fullmatch(f"odc_mpi: {self.line}", lines[0])
            assert found, f"{lines[0]}\nis not\n{self.line}"
            assert self.seen_s[0] <= float(found.group(1)) <= self.seen_s[1], lines[0]
        return done, lines
