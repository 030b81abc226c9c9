"""`Supervisor`: starts the ranks of a run, waits for their end, and decides whether to start them again.

Exit codes 0, 2 and 75 end the run, as do signals, failures that every start would repeat (`TrainingError`), the same
failure at the same step twice in a row, too few hosts, too many restarts, and two starts in a row that end before their
first step. After any other end, the hosts are
probed, and the ranks start from the newest checkpoint on those that are left. A host that does not answer, or that two
failures name, stays out.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from odc_mpi.errors import UserError
from odc_mpi.files import read_settings
from odc_mpi.supervisor.costs import Costs
from odc_mpi.supervisor.launchers import Mpiexec, Srun, answering, is_same_host, is_slurm, place_ranks, run_on_hosts
from odc_mpi.supervisor.process import LauncherProcess
from odc_mpi.training.rundir.records import FAILURE
from odc_mpi.training.rundir.run_dir_lock import lock_supervised

#: Number of failures that name a host after which it stays out.
_STRIKES = 2
#: Number of starts in a row without a step after which the ranks are not started again.
_MAX_FRUITLESS = 2
_STOPPED = 75
#: Seconds that `odc-mpi checkpoint rescue` may take.
_RESCUE_S = 600.0


class Commands(NamedTuple):
    """Commands of the ranks before and after a start has opened the run directory, and the one that rescues copies.

    `rescue` runs on each host before the ranks start again. It is None without copies in memory (`run.memory_every`).
    """

    first: Sequence[str]
    resumed: Sequence[str]
    rescue: Sequence[str] | None = None


@dataclass(frozen=True)
class Limits:
    """Number of ranks at the first start, minimum number of ranks, and maximum number of restarts."""

    ranks: int
    min_ranks: int
    max_restarts: int


class Supervisor:
    """Runs a command under a launcher. Construction locks `run_dir`; `run` releases it.

    Raises `UserError` if another supervisor has locked the directory, or if it cannot be created.
    """

    def __init__(self, launcher: Mpiexec | Srun, commands: Commands, run_dir: Path, limits: Limits) -> None:
        self._launcher, self._commands, self._limits = launcher, commands, limits
        self._hosts = list(launcher.hosts)
        self._strikes: Counter[str] = Counter()
        self._run_dir = run_dir.absolute()
        self._lock = lock_supervised(self._run_dir)
        self._failure_file = self._run_dir / FAILURE
        # Some launchers end all ranks at the first nonzero exit code: ranks that stop on request exit with 0.
        self._stopped_file = Path(os.environ.get("ODC_MPI_STOPPED_FILE") or self._run_dir / ".stopped")
        for name, path in (("FAILURE", self._failure_file), ("STOPPED", self._stopped_file)):
            os.environ[f"ODC_MPI_{name}_FILE"] = str(path)
        self._process, self._costs, self._restarts = LauncherProcess(), Costs(self._run_dir), 0
        self._fruitless_starts = 0
        self._last_failure: tuple[object, int] | None = None

    def run(self) -> int:
        """Run until the end, and return the exit code. Main thread only."""
        with self._lock, self._process:
            code = None
            while code is None:
                code = self._decide(self._start())
            self._costs.write()
            with suppress(OSError):
                self._stopped_file.unlink(missing_ok=True)
                self._run_dir.rmdir()  # if it is empty, because no start has begun the run
            if self._restarts:
                _print(self._costs.describe())
            return code

    def _start(self) -> int:
        """Start the ranks, wait for their end, and return the exit code."""
        with suppress(OSError):
            self._failure_file.unlink()
        self._costs.begin_start()
        hosts = place_ranks(self._hosts, self._limits.ranks)
        ranks = self._commands.resumed if self._costs.has_opened else self._commands.first
        command = [*self._launcher.command(hosts), *ranks]
        code = self._process.run(command, self._failure_file, self._look)
        if code == 0 and self._stopped_file.exists():
            return _STOPPED
        return code or int(self._costs.is_held())  # MPICH's mpiexec may return 0 although a rank died

    def _look(self) -> None:
        if self._costs.look() and self._restarts:
            self._costs.write()
            _print(self._costs.describe())

    def _decide(self, code: int) -> int | None:
        """Return the exit code of the run after a start that ended with `code`, or None to start again."""
        has_progress, failure = self._costs.end_start(), self._read_failure()
        self._fruitless_starts = 0 if has_progress else self._fruitless_starts + 1
        if code in (0, 2, _STOPPED) or failure.get("final"):
            return code
        if self._process.stop_requested:
            return code if has_progress else _STOPPED  # the same command starts again, and nothing is lost
        if self._launcher.is_ending():
            return _STOPPED
        what = f"{_describe(failure, code)}, after step {self._costs.step}"
        if self._fruitless_starts == _MAX_FRUITLESS:
            _print(f"{what}. {_MAX_FRUITLESS} starts in a row ended before their first step: not started again")
            return code
        before, self._last_failure = self._last_failure, (failure["error"], self._costs.step) if failure else None
        if failure and self._last_failure == before:
            _print(f"{what}. The same failure at the same step twice: not started again")
            return code
        if self._restarts == self._limits.max_restarts:
            _print(f"{what}. Not started again: --max-restarts {self._restarts}")
            return code
        self._costs.begin_probing()
        out = self._drop_hosts(failure)
        if self._process.stop_requested:
            return _STOPPED
        ranks = sum(host.ranks for host in place_ranks(self._hosts, self._limits.ranks))
        left = f"{what}{out}. {len(self._hosts)} of {len(self._launcher.hosts)} hosts left, with {ranks} ranks"
        if ranks < self._limits.min_ranks:
            _print(f"{left}: not started again: --min-ranks {self._limits.min_ranks}")
            return _STOPPED if is_slurm() else code  # the batch script requeues its job
        self._restarts += 1
        self._costs.restarts += 1
        _print(f"{left}: restart {self._restarts} of at most {self._limits.max_restarts}")
        self._rescue()
        return None

    def _rescue(self) -> None:
        """Make a checkpoint from the copies in the memory of the hosts that are left, if they have any."""
        if self._commands.rescue is None or not self._costs.has_opened:
            return
        self._costs.enter("rescuing")
        ends = run_on_hosts(self._launcher, self._hosts, self._commands.rescue, _RESCUE_S)
        lines = [(end.returncode, end.stdout.strip() or end.stderr.strip()) for end in ends if end]
        # One of the hosts finds that all have copied their pieces: its exit code is 0.
        _print(min(lines, default=(1, f"no host rescued a step within {_RESCUE_S:.0f} s"))[1])

    def _drop_hosts(self, failure: Mapping[str, Any]) -> str:
        """Drop hosts that do not answer or that failures name, and describe them."""
        named = str(failure.get("host", ""))
        for host in self._hosts:
            self._strikes[host.name] += bool(named) and is_same_host(host.name, named)
        good = [host for host in self._hosts if self._strikes[host.name] < _STRIKES]
        left = answering(self._launcher, good)
        dropped = {"does not answer": set(good) - set(left), f"failed {_STRIKES} times": set(self._hosts) - set(good)}
        self._hosts = left
        return "".join(f"; {host.name} {why}" for why, hosts in dropped.items() for host in sorted(hosts))

    def _read_failure(self) -> dict[str, Any]:
        with suppress(UserError):
            return read_settings(self._failure_file)
        return {}


def _describe(failure: Mapping[str, Any], code: int) -> str:
    if not failure:
        return f"the ranks ended with exit code {code}"
    return f"rank {failure.get('rank')} on {failure.get('host')} failed ({failure.get('error')})"


def _print(line: str) -> None:
    print(f"odc-mpi: {line}", file=sys.stderr, flush=True)
