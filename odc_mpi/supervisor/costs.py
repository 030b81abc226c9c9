"""Costs of failures, kept in restarts.json and added to summary.json.

restarts, lost_steps   numbers of restarts, and of steps that were done again
lost_noticing_s        from the last completed step to the end of the launcher
lost_probing_s         until it is known which hosts answer
lost_rescuing_s        until copies in memory have become a checkpoint (`run.memory_every`)
lost_starting_s        until the ranks have loaded the checkpoint and opened the run directory
lost_redoing_s         until the last completed step is done again
"""

import json
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.files import read_settings, write_or_warn
from odc_mpi.observe.metrics import SUMMARY, read_run_metrics, write_summary
from odc_mpi.training.rundir.records import RESTARTS
from odc_mpi.training.rundir.run_dir_lock import read_owner

_PHASES = ("noticing", "probing", "rescuing", "starting", "redoing")


class Costs:
    """Costs of a run so far. `step` is its last step; `has_opened` is True once a start has opened its directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.step, self.has_opened = run_dir, 0, False
        self.entries = {"restarts": 0, "lost_steps": 0, **{f"lost_{phase}_s": 0.0 for phase in _PHASES}}

    def begin_start(self) -> None:
        """Begin a start."""
        self._owner: dict[str, Any] | None = None
        self._owner_before, self._began = read_owner(self._run_dir), time.time()

    def look(self) -> None:
        """Find the record of the current start in owner.json, which a clean end removes."""
        if self._owner is None and self.is_held():
            self._owner = read_owner(self._run_dir)

    def is_held(self) -> bool:
        """Return True if the current start has opened the run directory, and has not closed it."""
        owner = read_owner(self._run_dir)
        return owner != self._owner_before and owner.get("step", -1) >= 0

    def end_start(self, num_restarts: int) -> bool:
        """Add the costs of a start, which is number `num_restarts` after the first. Return True if it made a step."""
        self.look()
        now = time.time()
        self._last_sign = now
        if self._owner is None:
            self._add("starting", now - self._began if num_restarts else 0)
            return False
        if not self.has_opened:  # a run that starts from scratch has moved the file of an earlier supervisor away
            with suppress(UserError, TypeError):
                earlier = read_settings(self._run_dir / RESTARTS)
                self.entries = {key: value + earlier.get(key, 0) for key, value in self.entries.items()}
            self.has_opened = True
        lines = read_run_metrics(self._run_dir, 1 << 62)
        times = {line["step"]: datetime.fromisoformat(line["time"]).timestamp() for line in lines}
        opened, began_at = self._owner["time_ns"] / 1e9, self._owner["step"]
        if num_restarts:
            self._add("starting", opened - self._began)
            self._add("redoing", times.get(self.step, now) - opened if self.step > began_at else 0)
            self.entries["lost_steps"] += max(0, self.step - began_at)
        was_redone, self.step = not num_restarts or self.step in times, max(times, default=0)
        self._last_sign = times.get(self.step, opened) if was_redone else now
        return self.step > began_at

    def count_restart(self, probing_s: float, rescuing_s: float) -> None:
        """Count a restart, and the seconds for probing hosts and for rescuing copies. Call this after `end_start`."""
        self.entries["restarts"] += 1
        self._add("noticing", time.time() - self._last_sign - probing_s - rescuing_s)
        self._add("probing", probing_s)
        self._add("rescuing", rescuing_s)

    def write(self) -> None:
        """Write restarts.json, and add its entries to summary.json if that exists. Before the run, do nothing."""
        if self.has_opened:
            write_or_warn(self._run_dir / RESTARTS, json.dumps(self.entries) + "\n")
            with suppress(UserError):
                if summary := read_settings(self._run_dir / SUMMARY):
                    write_summary(self._run_dir, summary | self.entries)

    def _add(self, phase: str, seconds: float) -> None:
        self.entries[f"lost_{phase}_s"] += max(0.0, seconds)
