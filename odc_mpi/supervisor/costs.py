"""Costs of failures: restarts, lost steps, and seconds by phase, kept in restarts.json and added to summary.json.

    noticing   from the last completed step to the end of the launcher
    probing    until it is known which hosts answer
    rescuing   until copies in memory have become a checkpoint (`run.memory_every`)
    starting   until the ranks have loaded the checkpoint and opened the run directory
    redoing    until the last completed step is done again

The run directory is the only source: owner.json has the step at which a start began, and metrics.jsonl the steps.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.files import read_settings, write_or_warn
from odc_mpi.observe.metrics import METRICS, SUMMARY, last_step, write_summary
from odc_mpi.training.rundir.records import RESTARTS
from odc_mpi.training.rundir.run_dir_lock import read_owner

PHASES = ("noticing", "probing", "rescuing", "starting", "redoing")


class Costs:
    """Costs of all restarts of a run, also of those under an earlier supervisor.

    Attributes:
        step: Last step that the run had completed when the current start began.
        began_at: Step at which the current start began, or None until it has opened the run directory.
        has_opened: True once any start has opened the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.restarts = self.lost_steps = self.step = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.has_opened = False
        self._phase, self._since, self._idle_s = "", 0.0, 0.0
        self.begin_start()

    def begin_start(self) -> None:
        """Begin a start, which is counted as a phase if the previous start was followed by another phase."""
        self.began_at: int | None = None
        self._owner_before = read_owner(self._run_dir)
        self.enter("starting" if self._phase else "")

    def enter(self, phase: str) -> None:
        """End the current phase, if any, and begin another one, unless it is ""."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def look(self) -> bool:
        """Read how far the current start has come. Return True when it has just redone all lost steps."""
        if self.began_at is None and self.is_held():
            self.began_at = int(read_owner(self._run_dir)["step"])
            self.enter("redoing" if self._phase else "")
            self.lost_steps += max(0, self.step - self.began_at)
            if not self.has_opened:
                self._add_earlier()
            self.has_opened = True
        if self._phase == "redoing" and last_step(self._run_dir) >= self.step:
            self.enter("")
            return True
        return False

    def is_held(self) -> bool:
        """Return True if the current start has opened the run directory, and has not closed it."""
        owner = read_owner(self._run_dir)
        return bool(owner) and owner != self._owner_before

    def end_start(self) -> bool:
        """End the current start. Return True if it has completed a step."""
        self.look()
        was_in_phase, self._idle_s = bool(self._phase), 0.0
        self.enter("")
        if self.began_at is None:
            return False
        self.step = last_step(self._run_dir)
        if not was_in_phase:
            with suppress(OSError):
                self._idle_s = max(0.0, time.time() - (self._run_dir / METRICS).stat().st_mtime)
        return self.step > self.began_at

    def begin_probing(self) -> None:
        """Begin a restart, after `end_start`."""
        self.seconds["noticing"] += self._idle_s
        self.enter("probing")

    def describe(self) -> str:
        """Describe all costs in one line."""
        restarts = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"{restarts} cost {sum(self.seconds.values()):.1f} s ({phases}); {self.lost_steps} lost steps done again"

    def write(self) -> None:
        """Write restarts.json, and add its entries to summary.json if that exists. Before the run, do nothing."""
        if not self.has_opened:
            return
        entries = {"restarts": self.restarts, "lost_steps": self.lost_steps, "lost_s": self.seconds}
        write_or_warn(self._run_dir / RESTARTS, json.dumps(entries) + "\n")
        with suppress(UserError):
            if summary := read_settings(self._run_dir / SUMMARY):
                write_summary(self._run_dir, summary | entries)

    def _add_earlier(self) -> None:
        """Add the costs under an earlier supervisor. A run that starts from scratch has moved the file away."""
        with suppress(UserError, KeyError, TypeError):
            earlier: dict[str, Any] = read_settings(self._run_dir / RESTARTS)
            if earlier:
                self.restarts += earlier["restarts"]
                self.lost_steps += earlier["lost_steps"]
                self.seconds = {phase: self.seconds[phase] + earlier["lost_s"].get(phase, 0.0) for phase in PHASES}
