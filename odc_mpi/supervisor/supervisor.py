"""`Supervisor`: starts the ranks of a run, waits for their end, and decides whether to start them again.

Exit codes 0, 2 and 75 end the run, as do signals, failures that every start would repeat, too few hosts and too many
restarts. After any other end the hosts are probed, and the ranks start from the newest checkpoint on those that are
left. A host that does not answer, or that two failures name, stays out.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from odc_mpi.errors import UserError
from odc_mpi.files import read_settings
from odc_mpi.supervisor.costs import Costs
from odc_mpi.supervisor.launchers import (
    Mpiexec,
    Srun,
    answering,
    is_same_host,
    is_slurm,
    job_is_ending,
    place_ranks,
    run_on_hosts,
)
from odc_mpi.training.rundir.records import FAILURE
from odc_mpi.training.rundir.run_dir_lock import lock_supervised

#: Number of failures that name a host after which it stays out, and number of starts in a row without a step after
#: which the ranks are not started again.
_STRIKES = _MAX_FRUITLESS = 2
#: Seconds between checks of the launcher and of the run directory.
_POLL_S = 0.1
#: Seconds that a launcher has to end after a rank has reported a failure, and again after SIGTERM. It may wait forever
#: for a host that is gone.
_GRACE_S = 3.0
#: Seconds after the first signal during which others are ignored, since they may have the same origin.
_REPEAT_S = 1.0
#: Seconds that `odc-mpi checkpoint rescue` may take.
_RESCUE_S = 600.0
_STOPPED = 75
_PR_SET_PDEATHSIG = 1


class Commands(NamedTuple):
    """Command lines: of ranks until a start has opened the run directory, of ranks of later starts, and of a rescue.

    `rescue` runs on each host before the ranks start again. It is None without copies in memory (`run.memory_every`).
    """

    first: Sequence[str]
    resumed: Sequence[str]
    rescue: Sequence[str] | None = None


class Supervisor:
    """Runs ranks under a launcher, and starts them again. Construction locks `run_dir`; `run` releases it.

    Main thread only.

    The first signal is passed on as SIGUSR1, which all launchers forward: the ranks save and end. A later SIGTERM or
    Ctrl-C ends the launcher. Raises `UserError` if another supervisor has locked `run_dir`, or if `run_dir` cannot be
    created.
    """

    def __init__(
        self, launcher: Mpiexec | Srun, commands: Commands, run_dir: Path, ranks: int, min_ranks: int, max_restarts: int
    ) -> None:
        self._launcher, self._commands, self._hosts = launcher, commands, list(launcher.hosts)
        self._ranks, self._min_ranks, self._max_restarts = ranks, min_ranks, max_restarts
        self._run_dir = run_dir.absolute()
        self._lock, self._costs = lock_supervised(self._run_dir), Costs(self._run_dir)
        self._failure_file = self._run_dir / FAILURE
        # Some launchers end all ranks at the first nonzero exit code: ranks that stop on request exit with 0.
        self._stopped_file = Path(os.environ.get("ODC_MPI_STOPPED_FILE") or self._run_dir / ".stopped")
        os.environ["ODC_MPI_FAILURE_FILE"] = str(self._failure_file)
        os.environ["ODC_MPI_STOPPED_FILE"] = str(self._stopped_file)
        self._strikes: Counter[str] = Counter()
        self._restarts = self._num_fruitless = 0
        self._last_failure: tuple[object, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._signaled_at = 0.0

    def run(self) -> int:
        """Run until the end, and return the exit code."""
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        with self._lock:
            code = None
            while code is None:
                for path in (self._failure_file, self._stopped_file):
                    path.unlink(missing_ok=True)
                code = self._decide(self._start())
                self._costs.write()
            if self._restarts:
                _print(", ".join(f"{key} {value:.4g}" for key, value in self._costs.entries.items()))
            self._stopped_file.unlink(missing_ok=True)
            with suppress(OSError):
                self._run_dir.rmdir()  # if it is empty, because no start has begun the run
        for number, before in previous.items():
            signal.signal(number, before)
        return code

    def _start(self) -> int:
        """Start the ranks, wait for their end, and return the exit code: 128 plus a signal that ends the launcher."""
        self._costs.begin_start()
        hosts, failed_at = place_ranks(self._hosts, self._ranks), 0.0
        command = self._commands.resumed if self._costs.has_opened else self._commands.first
        libc = ctypes.CDLL(None)
        self._process = process = subprocess.Popen(
            [*self._launcher.command(hosts), *command],
            stdin=subprocess.DEVNULL,
            # In a session of its own, so that Ctrl-C does not reach it. If this process is killed, launchers clean up.
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if self._signaled_at:
            process.send_signal(signal.SIGUSR1)
        while process.poll() is None:
            time.sleep(_POLL_S)
            self._costs.look()
            if not failed_at and self._failure_file.exists():
                failed_at = time.monotonic()
            if failed_at and (late_s := time.monotonic() - failed_at) > _GRACE_S:
                process.send_signal(signal.SIGTERM if late_s < 2 * _GRACE_S else signal.SIGKILL)
                time.sleep(_GRACE_S - _POLL_S)
        if self._stopped_file.exists():
            return _STOPPED
        code = int(process.returncode)
        # MPICH's mpiexec may return 0 although a rank died.
        return 128 - code if code < 0 else code or int(self._costs.is_held())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), not self._signaled_at
        self._signaled_at = self._signaled_at or now
        if is_first and number == signal.SIGINT:
            # Not with print, which the signal may have interrupted.
            os.write(2, b"odc-mpi: interrupted; saving after this step. Press Ctrl-C again to end at once\n")
        if self._process and is_first:
            self._process.send_signal(signal.SIGUSR1)
        elif self._process and number != signal.SIGUSR1 and now > self._signaled_at + _REPEAT_S:
            self._process.send_signal(signal.SIGTERM)

    def _decide(self, code: int) -> int | None:
        """Return the exit code of the run after a start that ended with `code`, or None to start again."""
        failure: dict[str, Any] = {}
        with suppress(UserError):
            failure = read_settings(self._failure_file)
        has_progress = self._costs.end_start(self._restarts)
        self._num_fruitless = 0 if has_progress else self._num_fruitless + 1
        if code in (0, 2, _STOPPED) or failure.get("final"):
            return code
        if (self._signaled_at and not has_progress) or job_is_ending():
            return _STOPPED  # nothing is lost
        before, self._last_failure = self._last_failure, (failure["error"], self._costs.step) if failure else None
        reasons = {
            f"{_MAX_FRUITLESS} starts in a row ended before their first step": self._num_fruitless == _MAX_FRUITLESS,
            "the same failure at the same step twice": before is not None and before == self._last_failure,
            f"--max-restarts {self._max_restarts}": self._restarts == self._max_restarts,
            "interrupted": bool(self._signaled_at),
        }
        who = f"rank {failure['rank']} on {failure['host']} failed ({failure['error']})" if failure else ""
        what = f"{who or f'the ranks ended with exit code {code}'}, after step {self._costs.step}"
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            _print(f"{what}. Not started again: {reason}")
            return code
        began = time.monotonic()
        what += self._drop_hosts(failure["host"] if failure else "")
        if self._signaled_at:
            return _STOPPED
        ranks = sum(host.ranks for host in place_ranks(self._hosts, self._ranks))
        if ranks < self._min_ranks:
            _print(f"{what}. Not started again: --min-ranks {self._min_ranks}, but the hosts have {ranks}")
            return _STOPPED if is_slurm() else code  # the batch script requeues its job
        self._restarts += 1
        probing_s = time.monotonic() - began
        _print(f"{what}. Restart {self._restarts} of at most {self._max_restarts}, ranks: {ranks}")
        self._rescue()
        self._costs.count_restart(probing_s, time.monotonic() - began - probing_s)
        return None

    def _rescue(self) -> None:
        """Make a checkpoint from the copies in the memory of the hosts that are left, if they have any."""
        if self._commands.rescue is None or not self._costs.has_opened:
            return
        ends = run_on_hosts(self._launcher, self._hosts, self._commands.rescue, _RESCUE_S)
        lines = [(end.returncode, end.stdout.strip() or end.stderr.strip()) for end in ends if end]
        # One of the hosts finds that all have copied their pieces: its exit code is 0.
        _print(min(lines, default=(1, f"no host rescued a step within {_RESCUE_S:.0f} s"))[1])

    def _drop_hosts(self, named: str) -> str:
        """Drop hosts that do not answer or that failures name, and describe them."""
        self._strikes.update(host.name for host in self._hosts if named and is_same_host(host.name, named))
        left = answering(self._launcher, [host for host in self._hosts if self._strikes[host.name] < _STRIKES])
        dropped, self._hosts = [host.name for host in self._hosts if host not in left], left
        why = {True: f"failed {_STRIKES} times", False: "does not answer"}
        return "".join(f"; {name} {why[self._strikes[name] == _STRIKES]}" for name in dropped)


def _print(line: str) -> None:
    print(f"odc-mpi: {line}", file=sys.stderr, flush=True)
