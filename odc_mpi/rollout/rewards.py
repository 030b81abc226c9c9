"""Rewards: functions of completions, TRL's signature, called for a prompt group at a time.

    f(prompts, completions, completion_ids, **columns) -> list of a number or None for each completion

All arguments are lists with an entry for each completion. Prompts and completions are texts; of a chat, lists of
messages. A column that a prompt does not have is None there. A function that does not take `**kwargs` gets the
arguments that it names. None means that the function does not apply to a completion: it counts nothing there, and a
completion to which no function applies has no part in the mean of its group, and no advantage.
"""

import importlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.errors import UserError, one_line_message, warn
from odc_mpi.rollout import builtin_rewards

RewardCallable = Callable[..., Sequence[float | None]]
#: Added to the deviation of a group before dividing by it, as TRL does.
EPSILON = 1e-4


@dataclass(frozen=True)
class RewardFunction:
    """A reward function.

    Attributes:
        name: Of the function alone, for metrics.
        spec: As the setting names it.
        function: What it does.
        weight: In the sum of all.
    """

    name: str
    spec: str
    function: RewardCallable
    weight: float


class GroupRewards:
    """The rewards of a prompt group.

    Args:
        per_function: float64 [functions, completions]; NaN where a function does not apply.
        weights: float64 [functions].
        num_failed: Completions that were left out because a function failed.

    Attributes:
        per_function: As given.
        rewards: float64 [completions], the weighted sum; NaN where no function applies.
        num_failed: As given.
    """

    def __init__(
        self, per_function: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], num_failed: int
    ) -> None:
        self.per_function, self.num_failed = per_function, num_failed
        self.rewards = np.nansum(per_function * weights[:, None], axis=0)
        self.rewards[np.isnan(per_function).all(axis=0)] = np.nan

    @property
    def std(self) -> float:
        """The deviation of the rewards that there are, with Bessel's correction; 0 of fewer than two."""
        valid = self.rewards[~np.isnan(self.rewards)]
        return float(valid.std(ddof=1)) if len(valid) > 1 else 0.0

    def advantages(self, *, scaled: bool) -> npt.NDArray[np.float64]:
        """Return the rewards less their mean, divided by their deviation if they are to be scaled.

        Returns:
            float64 [completions]; 0 where there is no reward, and all 0 if all rewards are equal.
        """
        valid = ~np.isnan(self.rewards)
        if not valid.any() or np.ptp(self.rewards[valid]) == 0:
            return np.zeros(len(self.rewards))
        advantages = self.rewards - self.rewards[valid].mean()
        return np.nan_to_num(advantages / (self.std + EPSILON) if scaled else advantages)


def load_reward_functions(specs: Sequence[str], weights: Sequence[float] | None) -> list[RewardFunction]:
    """Import reward functions. Local; runs the code of their modules.

    Args:
        specs: Each ``package.module:name``, ``file.py:name`` or the name of a built-in.
        weights: Of each; None for 1.

    Raises:
        UserError: There is no such function, or its module fails.
    """
    weights = weights or [1.0] * len(specs)
    functions = [
        RewardFunction(spec.rpartition(":")[2], spec, _load_function(spec), weight)
        for spec, weight in zip(specs, weights, strict=True)
    ]
    names = [reward.name for reward in functions]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UserError(f"rl.reward_funcs: expected functions of different names, got {duplicate} twice: rename one")
    return functions


def compute_rewards(
    functions: Sequence[RewardFunction],
    reward_kwargs: Mapping[str, Sequence[Any]],
    prompt: int,
    rank: int,
    *,
    timeout_s: float,
    skip: bool,
) -> GroupRewards:
    """Call the reward functions for a prompt group.

    Args:
        functions: The functions.
        reward_kwargs: `prompts`, `completions`, `completion_ids` and columns; each as long as there are completions.
        prompt: Number of the prompt, for messages.
        rank: Of this rank, for messages.
        timeout_s: Seconds that a function may take.
        skip: Whether completions of a function that fails are left out, instead of ending the run.

    Raises:
        UserError: A function raises, takes too long, or does not return a number or None for each completion.
    """
    count = len(reward_kwargs["completions"])
    per_function, failed = np.full((len(functions), count), np.nan), np.zeros(count, dtype=np.bool_)
    for row, reward in enumerate(functions):
        try:
            per_function[row] = _call(reward, reward_kwargs, count, timeout_s)
        except _FailedError as error:
            message = f"reward function {reward.spec}, prompt {prompt}, rank {rank}: {error}"
            if not skip:
                raise UserError(f"{message}; to leave such completions out: rl.skip_failed_rewards") from error
            warn(f"WARNING: {message}: left out")
            if error.values is not None:
                per_function[row] = error.values
            failed |= True if error.failed is None else error.failed
    per_function[:, failed] = np.nan
    return GroupRewards(per_function, np.array([reward.weight for reward in functions]), int(failed.sum()))


class _FailedError(Exception):
    """A function failed: for some completions alone, of which there are values for the others, or for all."""

    def __init__(
        self, message: str, values: npt.NDArray[np.float64] | None = None, failed: npt.NDArray[np.bool_] | None = None
    ) -> None:
        super().__init__(message)
        self.values, self.failed = values, failed


def _call(
    reward: RewardFunction, reward_kwargs: Mapping[str, Sequence[Any]], count: int, timeout_s: float
) -> npt.NDArray[np.float64]:
    try:
        with _time_limit(timeout_s):
            found = _to_list(reward.function(**_accepted_kwargs(reward.function, reward_kwargs)), count)
    except _ExpiredError as error:
        raise _FailedError(f"expected an answer within rl.reward_timeout_s, {timeout_s:g} s, got none") from error
    except _FailedError:
        raise
    except (Exception, SystemExit) as error:
        raise _FailedError(f"it raised {type(error).__name__}: {one_line_message(error)}") from error
    values = np.array([_number(value) for value in found])
    wrong = np.array([value is not None for value in found]) & ~np.isfinite(values)
    if wrong.any():
        first = int(wrong.argmax())
        text = " ".join(repr(found[first]).split())
        message = f"expected finite numbers or None, got {text} for completion {first}"
        raise _FailedError(message, values, wrong)
    return values


def _to_list(found: Any, count: int) -> list[Any]:
    """Return the answer of a function, a list or an array, as a list."""
    if isinstance(found, (str, bytes, Mapping, Set)) or not hasattr(found, "__len__") or getattr(found, "ndim", 1) == 0:
        raise _FailedError(f"expected a list of {count} numbers, got {type(found).__name__}")
    if len(found) != count:
        raise _FailedError(f"expected {count} rewards, one for each completion, got {len(found)}")
    return list(found)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _accepted_kwargs(function: RewardCallable, reward_kwargs: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the arguments that a function takes; all if it cannot be asked."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return dict(reward_kwargs)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(reward_kwargs)
    return {name: value for name, value in reward_kwargs.items() if name in parameters}


class _ExpiredError(BaseException):
    """A function took too long; not an `Exception`, which functions catch that try again what failed."""


@contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    """Raise _ExpiredError in the enclosed code after some seconds, where a signal may: in the main thread.

    Raised again each second, should the code catch all there is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running, expired = True, False

    def expire(number: int, frame: object) -> None:
        nonlocal expired
        expired = True
        if running:
            raise _ExpiredError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
    try:
        try:
            yield
        finally:
            running = False
    finally:  # also of a signal that comes just before `running` is False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if expired:
        raise _ExpiredError


def _load_function(spec: str) -> RewardCallable:
    module_name, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in builtin_rewards.REWARDS:
            known = ", ".join(builtin_rewards.REWARDS)
            raise UserError(
                f"rl.reward_funcs: expected package.module:name, file.py:name or one of {known}, got {spec!r}"
            )
        return builtin_rewards.REWARDS[spec]
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever somebody's module does
        raise UserError(
            f"rl.reward_funcs: {module_name!r} cannot be imported: {type(error).__name__}: {one_line_message(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"rl.reward_funcs: expected a function {name!r} in {module_name!r}, got none")
    return function


def _import(name: str) -> Any:
    # As `python -m` has it: modules beside where the run was started.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - what sys.path holds are strings
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"rl.reward_funcs: expected a file of Python at {str(path)!r}, got none")
    spec = importlib.util.spec_from_file_location(f"odc_mpi_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
