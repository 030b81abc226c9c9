"""Rewards are TRL's: arguments and results of the functions, their outcome, and one line for any error."""

import asyncio
import contextlib
import math
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from user_errors import refused

from odc_mpi.errors import UserError
from odc_mpi.rollout.rewards import (
    GroupRewards,
    RewardFunction,
    check_arguments,
    compute_rewards,
    load_reward_functions,
)

TEXTS = ["12", " 13 ", "the answer is 1,300.0", "#### 4 and\n#### 13"]


def arguments(**columns):
    lists = {name: [value] * len(TEXTS) for name, value in columns.items()}
    return {"prompts": ["p"] * 4, "completions": TEXTS, "completion_ids": [[1], [1, 2], [1] * 3, [1] * 4], **lists}


def as_rewards(*functions, weights=None):
    weights = weights or [1.0] * len(functions)
    names = [getattr(function, "__name__", "Judge") for function in functions]
    return [RewardFunction(n, f"mine.py:{n}", *each) for n, *each in zip(names, functions, weights, strict=True)]


def scored(*functions, weights=None, timeout_s=5.0, skip=False, **columns):
    rewards = as_rewards(*functions, weights=weights)
    return compute_rewards(rewards, arguments(**columns), 7, 3, timeout_s=timeout_s, skip=skip)


def built_in(name, **columns):
    return compute_rewards(
        load_reward_functions([name], None), arguments(**columns), 0, 0, timeout_s=5.0, skip=False
    ).rewards.tolist()


def test_what_comes_along():
    assert built_in("exact_match", answer="13") == [0, 1, 0, 0]
    assert built_in("exact_match", answer=13) == [0, 1, 0, 0]
    assert built_in("final_number", answer="so 5 + 8 = 13\n#### 13") == [0, 1, 0, 1]
    assert built_in("final_number", answer="1300") == [0, 0, 1, 0]
    assert built_in("regex", pattern="^[0-9]+$") == [1, 0, 0, 0]
    assert built_in("length") == [1, 2, 3, 4]
    assert all(math.isnan(value) for value in built_in("exact_match"))


def test_a_chat_has_messages():
    chat = arguments(answer="13") | {"completions": [[{"role": "assistant", "content": text}] for text in TEXTS]}
    found = compute_rewards(load_reward_functions(["exact_match"], None), chat, 0, 0, timeout_s=5.0, skip=False)
    assert found.rewards.tolist() == [0, 1, 0, 0]


def test_functions_from_a_file_and_a_module(tmp_path, monkeypatch):
    code = "def one(prompts, completions, completion_ids, **kwargs):\n    return [kwargs['n'][0]] * len(prompts)\n"
    (tmp_path / "own.py").write_text(code + "def two(completions):\n    return [2] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = load_reward_functions([f"{tmp_path / 'own.py'}:one", "own:two"], [1, 0.5])
    assert [reward.name for reward in rewards] == ["one", "two"]
    found = compute_rewards(rewards, arguments(n=5), 0, 0, timeout_s=5.0, skip=False)
    assert found.per_function.tolist() == [[5] * 4, [2] * 4] and found.rewards.tolist() == [6] * 4


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["exact"], "one of exact_match"),
        (["none.py:f"], "the Python file 'none.py' does not exist"),
        (["no.such.module:f"], "cannot be imported"),
        (["math:nothing"], "there is no function 'nothing'"),
        (["length", "math:length"], "there is no function 'length'"),
        (["length", "length"], "different names"),
    ],
)
def test_missing_functions_are_reported(specs, words):
    refused(words, load_reward_functions, specs, None)


def hangs(completions):
    while True:
        time.sleep(0.01)


def tries_again(completions):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(9)


def catches_all(completions):
    with contextlib.suppress(BaseException):
        time.sleep(9)
    return [1.0] * 4


async def waits_forever(completions):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(9)
    await asyncio.sleep(9)


async def blocks(completions):
    time.sleep(0.3)


async def exits(completions):
    sys.exit("no model")


async def one_reward(completions):
    return [1.0]


@pytest.mark.parametrize(
    ("function", "words", "num_failed"),
    [
        (lambda completions: {}["answer"], "it raised KeyError: 'answer'", 4),
        (hangs, "it did not return within rl.reward_timeout_s, 0.2 s", 4),
        (tries_again, "it did not return within rl.reward_timeout_s, 0.2 s", 4),
        (catches_all, "it did not return within rl.reward_timeout_s, 0.2 s", 4),
        (lambda completions: sys.exit("no model"), "it raised SystemExit: no model", 4),
        (waits_forever, "it did not return within rl.reward_timeout_s, 0.2 s", 4),
        (exits, "it raised SystemExit: no model", 4),
        (one_reward, "expected 4 rewards, one for each completion, got 1", 4),
        (lambda completions: [1.0], "expected 4 rewards, one for each completion, got 1", 4),
        (lambda completions: [1.0, math.nan, 3.0, "much"], "got nan for completion 1", 2),
        (lambda completions: 3, "expected a list of 4 numbers, got int", 4),
        (lambda completions: torch.tensor(1.0), "expected a list of 4 numbers, got Tensor", 4),
        (lambda completions: dict.fromkeys(completions, 1.0), "expected a list of 4 numbers, got dict", 4),
        (blocks, "it did not return within rl.reward_timeout_s, 0.2 s", 4),  # last, because it blocks the event loop
    ],
)
def test_a_function_that_fails_is_named_or_left_out(function, words, num_failed, capfd):
    with pytest.raises(UserError) as raised:
        scored(function, timeout_s=0.2)
    assert f"reward function mine.py:{function.__name__}, prompt 7, rank 3: " in str(raised.value)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    found = scored(function, timeout_s=0.2, skip=True)
    assert found.num_failed == np.isnan(found.rewards).sum() == num_failed
    assert "WARNING: reward function mine.py" in capfd.readouterr().err
    assert found.advantages(scaled=True)[np.isnan(found.rewards)].tolist() == [0] * num_failed


def test_asynchronous_functions_run_at_the_same_time_in_one_event_loop():
    """Like those of TRL; also methods."""
    loops, turns = [], []

    async def judge(completions, answer, **columns):
        loops.append(asyncio.get_running_loop())
        turns.append(answer[0])
        while len(turns) % 2:  # until the other function has begun
            await asyncio.sleep(0.001)
        return [float(len(text)) for text in completions]

    class Judge:
        async def __call__(self, completions, **columns):
            return await judge(completions, ["b"])

    for call in (1, 2):
        found = scored(judge, lambda completions: [None, 1, 1, 1], Judge(), weights=[1.0, 100.0, 10.0], answer="a")
        assert found.rewards.tolist() == [11 * len(TEXTS[0]), *(100 + 11 * len(text) for text in TEXTS[1:])]
        assert sorted(turns) == ["a"] * call + ["b"] * call
    assert len(set(loops)) == 1


def test_one_asynchronous_function_that_hangs_is_named():
    async def is_fast(completions):
        return [1.0] * 4

    refused("mine.py:waits_forever, prompt 7", scored, is_fast, waits_forever, is_fast, timeout_s=0.2)


def test_a_notebook_has_an_event_loop_of_its_own():
    async def cell():
        return scored(one_reward, skip=True), scored(is_even)

    async def is_even(completion_ids):
        assert threading.current_thread() is not threading.main_thread()
        return [len(tokens) % 2 == 0 for tokens in completion_ids]

    failed, found = asyncio.run(cell())
    assert failed.num_failed == 4 and found.rewards.tolist() == [0, 1, 0, 1]


def judged_by_position(completions, /):
    return []


def judged_in_training(completions, answer, *rest, trainer_state, **columns):
    return []


@pytest.mark.parametrize(
    ("function", "columns", "words"),
    [
        (
            judged_in_training,
            {"answer": None, "n": None},
            "missing .*'trainer_state': .*completion_ids and .* data.path .answer, n.",
        ),
        (
            judged_in_training,
            {"trainer_state": None},
            "missing .*'answer': .* .trainer_state.",
        ),
        (judged_by_position, {}, "'completions'.* positional.only"),
        (one_reward, {}, None),
        (lambda prompts, completion_ids, n=3, *rest, log_extra=None, **columns: [], {}, None),
        (max, {}, None),  # without a signature
    ],
)
def test_arguments_that_do_not_exist_are_reported(function, columns, words):
    if words is None:
        check_arguments(as_rewards(function), {"data.path": SimpleNamespace(columns=columns)})
    else:
        refused(
            f"rl.reward_funcs: mine.py:{function.__name__}: {words}",
            check_arguments,
            as_rewards(function),
            {"data.path": SimpleNamespace(columns=columns)},
        )


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_have_no_advantages(scaled):
    for equal in ([0.1] * 7, [math.nan, 3.0], [math.nan] * 3):
        assert not GroupRewards(np.array([equal]), np.array([1.0]), 0).advantages(scaled=scaled).any()


def test_arrays_and_tensors_are_lists_of_rewards():
    wanted = [0.0, 1.0, 2.0, 3.0]
    for function in (
        lambda completions: np.arange(4),
        lambda completions: torch.arange(4),
        lambda completions: range(4),
    ):
        assert scored(function).rewards.tolist() == wanted


def test_none_leaves_out_a_function_for_a_completion():
    found = scored(lambda completions: [None, 1, 2, None], lambda completions: [None, None, 3, 4], weights=[2.0, 10.0])
    np.testing.assert_array_equal(found.rewards, [math.nan, 2, 34, 40])
