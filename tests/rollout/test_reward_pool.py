"""Rewards in threads: a slow function stops no other, limits and errors are those of the main thread, nothing hangs."""

import asyncio
import contextlib
import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from user_errors import refused

from odc_mpi.rollout.reward_pool import RewardPool
from odc_mpi.rollout.rewards import RewardCaller, RewardFunction

#: Deadline of tests, far beyond all limits in them.
LONG_S = 30.0


def scorer(*functions, timeout_s=LONG_S, skip=False):
    rewards = [RewardFunction(each.__name__, f"mine.py:{each.__name__}", each, 1.0) for each in functions]
    return RewardCaller(rewards, 3, timeout_s, skip)


def arguments(value, count=2):
    return {"completions": ["a"] * count, "value": [value] * count}


def collect(pool, count):
    """Keys and rewards of the next `count` groups, in the order in which they became ready."""
    found, until = [], time.monotonic() + LONG_S
    while len(found) < count:
        assert pool.wait(until - time.monotonic())
        found += [(key, group.rewards.tolist()) for key, group in pool.finished()]
    return found


def test_a_slow_verifier_stops_no_other_group():
    released = threading.Event()

    def judge(completions, value):
        assert value[0] or released.wait(LONG_S)
        return value

    with RewardPool(scorer(judge), 2) as pool:
        for value in range(6):
            pool.submit(f"key {value}", arguments(value), value)
        assert pool.num_pending == 6
        assert collect(pool, 5) == [(f"key {value}", [value] * 2) for value in range(1, 6)]
        assert pool.num_pending == 1 and not pool.wait(0.01) and not [*pool.finished()]
        released.set()
        assert collect(pool, 1) == [("key 0", [0, 0])]
        assert not pool.num_pending and not pool.wait(LONG_S)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_rewards_do_not_depend_on_which_group_is_ready_first(num_workers):
    def judge(completions, value):
        time.sleep(0.02 * (7 * value[0] % 5))
        return [value[0] + i / 3 for i in range(len(completions))]

    async def other(value):
        await asyncio.sleep(0.01)
        return [None, value[0] / 7]

    wanted = {value: scorer(judge, other)(arguments(value), value).rewards.tolist() for value in range(8)}
    with RewardPool(scorer(judge, other), num_workers) as pool:
        for value in range(8):
            pool.submit(value, arguments(value), value)
        assert dict(collect(pool, 8)) == wanted


def sleeps(completions):
    time.sleep(9)


def tries_again(completions):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


async def waits_forever(completions):
    await asyncio.sleep(9)


def leaves(completions):
    sys.exit("no model")


def raises(completions):
    return {}["answer"]


def times_out(completions):
    raise TimeoutError("of the server")


async def async_times_out(completions):
    raise TimeoutError("of the server")


def returns_nan(completions):
    return [1.0, math.nan]


LATE = "did not return within rl.reward_timeout_s, 0.2 s"
FAILURES = [
    *((function, LATE, 2) for function in (sleeps, tries_again, waits_forever)),
    *((function, "it raised TimeoutError: of the server", 2) for function in (times_out, async_times_out)),
    (leaves, "it raised SystemExit: no model", 2),
    (raises, "it raised KeyError: 'answer'", 2),
    (returns_nan, "expected finite numbers or None, got nan for completion 1", 1),
]


@pytest.mark.parametrize(("function", "words", "num_failed"), FAILURES)
def test_a_function_that_fails_is_named_or_left_out(function, words, num_failed, capfd):
    def judge(completions):
        return [1.0] * len(completions)

    name = f"reward function mine.py:{function.__name__}, prompt 7, rank 3: "
    began = time.monotonic()
    with RewardPool(scorer(judge, function, timeout_s=0.2), 1) as pool:
        pool.submit("a", arguments(0), 7)
        refused(f"{name}...{words}", collect, pool, 1)
        assert not pool.num_pending
    with RewardPool(scorer(judge, function, timeout_s=0.2, skip=True), 1) as pool:
        for _ in range(2):  # the thread goes on to the next group
            pool.submit("a", arguments(0), 7)
        found = collect(pool, 2)
        assert [np.isnan(rewards).sum() for _, rewards in found] == [num_failed] * 2
    assert capfd.readouterr().err.count(f"WARNING: {name}") == 2
    assert time.monotonic() - began < 6  # not the 9 seconds of the functions


def test_a_function_that_has_expired_ends():
    """Its thread does not remain, unless it is stuck in C."""
    threads = []

    def hangs(completions):
        threads.append(threading.current_thread())
        tries_again(completions)

    with RewardPool(scorer(hangs, timeout_s=0.1), 1) as pool:
        pool.submit("a", arguments(0), 7)
        refused("mine.py:hangs", collect, pool, 1)
    threads[0].join(LONG_S)
    assert not threads[0].is_alive()


def test_reward_models_compute_in_the_main_thread_and_others_do_not():
    callers = {"judge": [], "model": []}

    def judge(completions):
        callers["judge"].append(threading.current_thread())
        return [1.0] * len(completions)

    def model(completions):
        callers["model"].append(threading.current_thread())
        return [10.0] * len(completions)

    model.main_thread_only = True
    with RewardPool(scorer(model, judge), 2) as pool:
        pool.submit("a", arguments(0), 7)
        assert collect(pool, 1) == [("a", [11.0, 11.0])]
    assert callers["model"] == [threading.main_thread()] != callers["judge"]
    assert len(callers["judge"]) == 1


def test_asynchronous_functions_of_several_groups_run_at_the_same_time():
    running = []

    async def judge(value):
        running.append(value[0])
        while len(running) < 3:
            await asyncio.sleep(0.001)
        return value

    with RewardPool(scorer(judge), 3) as pool:
        for value in range(3):
            pool.submit(value, arguments(value), value)
        assert sorted(collect(pool, 3)) == [(value, [value] * 2) for value in range(3)]


STUCK = """
import time
from odc_mpi.rollout.reward_pool import RewardPool
from odc_mpi.rollout.rewards import RewardFunction, RewardCaller

function = RewardFunction("f", "f", lambda completions: time.sleep(600), 1.0)
pool = RewardPool(RewardCaller([function], 0, 500.0, False), 2)
for prompt in range(5):
    pool.submit(prompt, {"completions": ["a"]}, prompt)
assert not pool.wait(0.2)
pool.close()
pool.close()
print("closed")
"""


def test_closing_does_not_wait_for_a_function_that_is_stuck():
    ended = subprocess.run([sys.executable, "-c", STUCK], timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr
