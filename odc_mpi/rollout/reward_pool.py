"""Rewards computed in threads of a rank, so that a slow verifier stops neither decoding nor other rewards.

    submit      pass a group of completions to the threads
    finished    the groups that are ready; their reward models, if any, compute here, in the calling thread
    wait        sleep until a group is ready

Threads are enough because verifiers wait for something: a server, a subprocess, a sandbox. Verifiers that compute in
Python share the interpreter with decoding. Reward models stay in the main thread: they use the device and the torch
threads that decoding and training use. This module does not communicate between ranks.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from odc_mpi.rollout.rewards import GroupRewards, PartialRewards, RewardCaller


@dataclass
class _Group:
    """A group of completions. `outcome` is None until the functions that may run in any thread have been called."""

    key: int
    reward_kwargs: Mapping[str, Sequence[Any]]
    prompt: int
    outcome: PartialRewards | BaseException | None = None


class RewardPool(AbstractContextManager["RewardPool"]):
    """Computes the rewards of groups in `num_workers` threads, or in the calling thread if that is 0.

    All methods must be called from one thread, the main thread of the rank.
    """

    def __init__(self, rewards_of: RewardCaller, num_workers: int) -> None:
        self._rewards_of, self._num_workers = rewards_of, num_workers
        self._tasks: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._done: deque[_Group] = deque()
        self._is_ready = threading.Condition()
        #: Number of groups that were submitted and not yet returned by `finished`.
        self.num_pending = 0
        for _ in range(num_workers):  # daemons, so that a stuck function does not keep the process from ending
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, key: int, reward_kwargs: Mapping[str, Sequence[Any]], prompt: int) -> None:
        """Start computing the rewards of the completions of a prompt, and return at once.

        `reward_kwargs` and `prompt` are the arguments of `RewardCaller`. `key` is returned with the rewards.
        """
        self.num_pending += 1
        group = _Group(key, reward_kwargs, prompt)
        if self._num_workers:
            self._tasks.put(group)
        else:
            self._done.append(group)

    def finished(self) -> Iterator[tuple[int, GroupRewards]]:
        """Yield the key and the rewards of each group that is ready, in the order in which they became ready.

        Raises the `UserError` of a group for which a function failed (see `RewardCaller`).
        """
        while self._done:
            group = self._done.popleft()
            self.num_pending -= 1
            if isinstance(group.outcome, BaseException):
                raise group.outcome
            if group.outcome is None:
                group.outcome = self._rewards_of.beside(group.reward_kwargs, group.prompt)
            yield group.key, self._rewards_of.complete(group.reward_kwargs, group.prompt, group.outcome)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a group is ready or has failed, at most `timeout_s` seconds. Return False if there is none."""
        if self.num_pending:
            with self._is_ready:
                self._is_ready.wait_for(lambda: bool(self._done), timeout_s)
        return bool(self._done)

    def close(self) -> None:
        """Drop all groups and end the threads, without waiting for functions that are running. May be repeated."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in range(self._num_workers):
            self._tasks.put(None)
        self._num_workers = self.num_pending = 0
        self._done.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (group := self._tasks.get()) is not None:
            try:
                group.outcome = self._rewards_of.beside(group.reward_kwargs, group.prompt)
            except BaseException as error:  # `finished` raises it in the main thread
                group.outcome = error
            with self._is_ready:
                self._done.append(group)
                self._is_ready.notify_all()
