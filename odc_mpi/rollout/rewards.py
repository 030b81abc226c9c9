"""Reward functions with the same signature as in TRL, which are called for all completions of one prompt at a time.

    f(prompts, completions, completion_ids, **columns) -> list with a number or None for each completion

All arguments are lists with one entry per completion. Prompts and completions are strings, or lists of messages if the
prompt is a conversation. If the prompt lacks a column, the entries of this column are None. A function without
`**kwargs` receives only the arguments in its signature. A result of None means that the function does not apply to the
completion and adds nothing to its reward. A completion to which no function applies has an advantage of 0 and does not
affect the advantages of the prompt's other completions. Asynchronous functions run at the same time, in a thread.
"""

import importlib
import importlib.util
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.prompt_dataset import REWARD_ARGUMENTS
from odc_mpi.errors import UserError, one_line_message, warn
from odc_mpi.hub import parse_name
from odc_mpi.rollout import builtin_rewards
from odc_mpi.rollout.math_reward import require_math_verify
from odc_mpi.rollout.time_limits import ExpiredError, start

RewardCallable = Callable[..., Sequence[float | None]]
#: Number added to the standard deviation of a group before advantages are divided by it, as in TRL.
EPSILON = 1e-4


@dataclass(frozen=True)
class RewardFunction:
    """Reward function with its name in metrics, its entry `spec` in `rl.reward_funcs`, and its weight in the reward."""

    name: str
    spec: str
    function: RewardCallable
    weight: float


class GroupRewards:
    """Rewards for the completions of a prompt.

    Attributes:
        per_function: Unweighted rewards, float64 `[functions, completions]`. An entry is NaN if the function does not
            apply to the completion, or if any function failed for the completion.
        rewards: Sums over the functions, weighted by `weights`, float64 `[completions]`. NaN if all terms are NaN.
        num_failed: Number of completions for which a function failed.
    """

    def __init__(
        self, per_function: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], num_failed: int
    ) -> None:
        self.per_function, self.num_failed = per_function, num_failed
        self.rewards = np.nansum(per_function * weights[:, None], axis=0)
        self.rewards[np.isnan(per_function).all(axis=0)] = np.nan

    @property
    def std(self) -> float:
        """Standard deviation of the rewards, ignoring NaN, with Bessel's correction; 0 for fewer than two rewards."""
        valid = self.rewards[~np.isnan(self.rewards)]
        return float(valid.std(ddof=1)) if len(valid) > 1 else 0.0

    def advantages(self, *, scaled: bool) -> npt.NDArray[np.float64]:
        """Return the rewards minus their mean, divided by their standard deviation plus `EPSILON` if `scaled` is True.

        The result, float64 `[completions]`, is 0 where a reward is NaN, and everywhere if all other rewards are equal.
        """
        valid = ~np.isnan(self.rewards)
        if not valid.any() or np.ptp(self.rewards[valid]) == 0:
            return np.zeros(len(self.rewards))
        advantages = self.rewards - self.rewards[valid].mean()
        return np.nan_to_num(advantages / (self.std + EPSILON) if scaled else advantages)


def load_reward_functions(
    specs: Sequence[str], weights: Sequence[float] | None, device: torch.device | str = "cpu", time: str | None = None
) -> list[RewardFunction]:
    """Import reward functions, which runs their modules' code. If `weights` is None, all weights are 1.

    Each entry of `specs` is ``package.module:name``, ``file.py:name``, the name of a built-in function, or the
    directory of a reward model, which is loaded onto `device` (for `time`, see `RewardModel`). Raises `UserError` if
    a function is missing, two functions have the same name, a module raises an exception, or a model cannot be loaded.
    """
    weights = weights or [1.0] * len(specs)
    functions = [
        RewardFunction(_name(spec), spec, _load_function(spec, device, time), weight)
        for spec, weight in zip(specs, weights, strict=True)
    ]
    names = [reward.name for reward in functions]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"rl.reward_funcs: expected functions of different names, got {duplicate} twice: rename one")
    return functions


def check_arguments(functions: Sequence[RewardFunction], datasets: Mapping[str, Any]) -> None:
    """Raise `UserError` if a function cannot be called because it requires an argument that it will not receive.

    It will receive `REWARD_ARGUMENTS` and the columns of the prompts. `datasets` maps the settings data.path and
    data.eval_path to their `PromptDataset`.
    """
    for reward, (setting, prompts) in itertools.product(functions, datasets.items()):
        arguments = _accepted_kwargs(reward.function, dict.fromkeys((*REWARD_ARGUMENTS, *prompts.columns), ()))
        try:
            inspect.signature(reward.function).bind(**arguments)
        except ValueError:  # some functions in C have no signature
            continue
        except TypeError as error:
            raise UserError(
                f"rl.reward_funcs: {reward.spec}: {error}: functions receive {', '.join(REWARD_ARGUMENTS)} and the "
                f"columns of {setting} ({', '.join(prompts.columns) or 'none'}): give it a default, or add a column"
            ) from error


class PartialRewards(NamedTuple):
    """Rewards of the functions that have been called, float64 `[functions, completions]`, otherwise NaN.

    `failed`, bool `[completions]`, is True for the completions for which a function failed.
    """

    values: npt.NDArray[np.float64]
    failed: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RewardCaller:
    """Calls all reward functions for the completions of one prompt.

    A function fails if it raises an exception, exceeds the time limit, or does not return a finite number or None for
    each completion. Functions with a true attribute `main_thread_only`, such as reward models, are called in the main
    thread, by `complete`. `beside`, which calls the others, may run in any thread.

    Attributes:
        rank: Number of this rank, for use in messages.
        timeout_s: Time limit in seconds for each function.
        skip: True to print a warning instead of raising an error if a function fails. The completions for which it
            failed (all of them if the call itself failed) then have a reward of NaN and an advantage of 0.
    """

    functions: Sequence[RewardFunction]
    rank: int
    timeout_s: float
    skip: bool

    def __call__(self, reward_kwargs: Mapping[str, Sequence[Any]], prompt: int) -> GroupRewards:
        """Call all functions in this thread, which must be the main thread if any has to be, and return the rewards.

        Raises `UserError` if a function fails and `skip` is False.

        Args:
            reward_kwargs: Keyword arguments for the functions: `prompts`, `completions`, `completion_ids` and columns.
                Each is a list with one entry per completion.
            prompt: Index of the prompt, for use in messages.
        """
        return self.complete(reward_kwargs, prompt, self.beside(reward_kwargs, prompt))

    def beside(self, reward_kwargs: Mapping[str, Sequence[Any]], prompt: int) -> PartialRewards:
        """Call the functions that may run in any thread, with the arguments and the errors of `__call__`."""
        count = len(reward_kwargs["completions"])
        rewards = PartialRewards(np.full((len(self.functions), count), np.nan), np.zeros(count, dtype=np.bool_))
        self._fill(rewards, reward_kwargs, prompt, main_thread=False)
        return rewards

    def complete(
        self, reward_kwargs: Mapping[str, Sequence[Any]], prompt: int, rewards: PartialRewards
    ) -> GroupRewards:
        """Call the remaining functions, and return the rewards. `rewards` comes from `beside`, and is changed."""
        self._fill(rewards, reward_kwargs, prompt, main_thread=True)
        rewards.values[:, rewards.failed] = np.nan
        weights = np.array([reward.weight for reward in self.functions])
        return GroupRewards(rewards.values, weights, int(rewards.failed.sum()))

    def _fill(
        self, rewards: PartialRewards, reward_kwargs: Mapping[str, Sequence[Any]], prompt: int, *, main_thread: bool
    ) -> None:
        calls = [
            (row, reward.spec, start(reward.function, **_accepted_kwargs(reward.function, reward_kwargs)))
            for row, reward in enumerate(self.functions)
            if getattr(reward.function, "main_thread_only", False) == main_thread
        ]
        for row, spec, call in calls:
            try:
                rewards.values[row] = _call(call, len(rewards.failed), self.timeout_s)
            except _FailedError as error:
                message = f"reward function {spec}, prompt {prompt}, rank {self.rank}: {error}"
                if not self.skip:
                    raise UserError(f"{message}; set rl.skip_failed_rewards to exclude such completions") from error
                warn(f"WARNING: {message}: excluded")
                rewards.values[row] = error.values
                rewards.failed[:] |= error.failed


class _FailedError(Exception):
    """Raised if a function fails for the completions where `failed` is True. `values` has the rewards of the rest."""

    def __init__(self, message: str, values: Any = math.nan, failed: Any = True) -> None:
        super().__init__(message)
        self.values, self.failed = values, failed


def _call(call: Callable[[float], Any], count: int, timeout_s: float) -> npt.NDArray[np.float64]:
    try:
        rewards = _to_list(call(timeout_s), count)
    except ExpiredError as error:
        raise _FailedError(f"it did not return within rl.reward_timeout_s, {timeout_s:g} s") from error
    except _FailedError:
        raise
    except (Exception, SystemExit) as error:
        raise _FailedError(f"it raised {type(error).__name__}: {one_line_message(error)}") from error
    values = np.array([_to_float(reward) for reward in rewards])
    invalid = np.array([reward is not None for reward in rewards]) & ~np.isfinite(values)
    if invalid.any():
        first = int(invalid.argmax())
        text = " ".join(repr(rewards[first]).split())
        message = f"expected finite numbers or None, got {text} for completion {first}"
        raise _FailedError(message, values, invalid)
    return values


def _to_list(rewards: Any, count: int) -> list[Any]:
    is_scalar = not hasattr(rewards, "__len__") or getattr(rewards, "ndim", 1) == 0
    if isinstance(rewards, (str, bytes, Mapping, Set)) or is_scalar:
        raise _FailedError(f"expected a list of {count} numbers, got {type(rewards).__name__}")
    if len(rewards) != count:
        raise _FailedError(f"expected {count} rewards, one for each completion, got {len(rewards)}")
    return list(rewards)


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _accepted_kwargs(function: RewardCallable, reward_kwargs: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the keyword arguments that a function accepts, or all of them if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return dict(reward_kwargs)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in reward_kwargs.items() if takes_all or name in parameters}


def _name(spec: str) -> str:
    """Return the name of a reward function, or the name of the directory or Hub model of a reward model."""
    of_hub = parse_name(spec)
    return Path(of_hub[0] if of_hub else spec.rpartition(":")[2]).name


def _load_function(spec: str, device: torch.device | str, time: str | None) -> RewardCallable:
    module_name, colon, name = spec.rpartition(":")
    if not colon:
        if spec == "math":
            require_math_verify()
        if spec in builtin_rewards.REWARDS:
            return builtin_rewards.REWARDS[spec]
        if Path(spec).is_dir():
            # Imported late: transformers takes seconds.
            from odc_mpi.rollout.reward_model import RewardModel

            return RewardModel(Path(spec), device, time)
        known = ", ".join(builtin_rewards.REWARDS)
        raise UserError(
            "rl.reward_funcs: expected package.module:name, file.py:name, the directory of a reward model, or one of "
            f"{known}, got {spec!r}"
        )
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserError(
            f"rl.reward_funcs: {module_name!r} cannot be imported: {type(error).__name__}: {one_line_message(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"rl.reward_funcs: there is no function {name!r} in {module_name!r}")
    return function


def _import(name: str) -> Any:
    # As with `python -m`, modules in the working directory can be imported.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - sys.path contains strings
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"rl.reward_funcs: the Python file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(f"odc_mpi_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
