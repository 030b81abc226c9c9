"""Rewards are TRL's: arguments and results of the functions, their outcome, one line for any error; reward models."""

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
import transformers
from tiny_qwen2 import SIZES
from user_errors import refused

from odc_mpi.data.tokenizer import train_tokenizer
from odc_mpi.models.heads import ENDS_WITH_TURN
from odc_mpi.rollout import math_reward
from odc_mpi.rollout.rewards import (
    GroupRewards,
    RewardCaller,
    RewardFunction,
    check_arguments,
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
    return RewardCaller(rewards, 3, timeout_s, skip)(arguments(**columns), 7)


def built_in(name, **columns):
    return RewardCaller(load_reward_functions([name], None), 0, 5.0, False)(arguments(**columns), 0).rewards.tolist()


def test_what_comes_along():
    assert built_in("exact_match", answer="13") == [0, 1, 0, 0]
    assert built_in("exact_match", answer=13) == [0, 1, 0, 0]
    assert built_in("final_number", answer="so 5 + 8 = 13\n#### 13") == [0, 1, 0, 1]
    assert built_in("final_number", answer="1300") == [0, 0, 1, 0]
    assert built_in("regex", pattern="^[0-9]+$") == [1, 0, 0, 0]
    assert built_in("length") == [1, 2, 3, 4]
    assert all(math.isnan(value) for value in built_in("exact_match"))


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac12}", 1),
        (0.5, r"so \boxed{\frac12}", 1),
        ("1/2", "It is 0.25.", 0),
        ("1300", "they are 1,300 in all", 1),
        ("(1,2]", r"\boxed{(1,2]}", 1),
        ("(1,2]", r"\boxed{(1,2)}", 0),
        (r"\{1,2\}", r"$\{2, 1\}$", 1),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", 1),
        ("7", "I do not know", 0),
        ("", "7", None),
        ("7", r"\boxed{9^{9^{9}}}", 0),  # whose computation holds the interpreter
        ("7", "7", 1),
    ],
)
def test_mathematical_values(answer, text, reward, monkeypatch):
    pytest.importorskip("math_verify")
    began = time.monotonic()
    monkeypatch.setattr(math_reward, "LIMIT_S", 1.0)
    given = {"completions": [text], "answer": [answer]}
    scorer, found = RewardCaller(load_reward_functions(["math"], None), 0, 30.0, False), []
    thread = threading.Thread(target=lambda: found.append(scorer(given, 0).rewards))
    thread.start()
    for rewards in (scorer(given, 0).rewards, *(thread.join() or found)):
        np.testing.assert_array_equal(rewards, [math.nan if reward is None else reward])
    assert time.monotonic() - began < 60


def test_without_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    refused("rl.reward_funcs: math requires math-verify: pip install", load_reward_functions, ["math"], None)


def test_a_chat_has_messages():
    chat = arguments(answer="13") | {"completions": [[{"role": "assistant", "content": text}] for text in TEXTS]}
    found = RewardCaller(load_reward_functions(["exact_match"], None), 0, 5.0, False)(chat, 0)
    assert found.rewards.tolist() == [0, 1, 0, 0]


def test_functions_from_a_file_and_a_module(tmp_path, monkeypatch):
    code = "def one(prompts, completions, completion_ids, **kwargs):\n    return [kwargs['n'][0]] * len(prompts)\n"
    (tmp_path / "own.py").write_text(code + "def two(completions):\n    return [2] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = load_reward_functions([f"{tmp_path / 'own.py'}:one", "own:two"], [1, 0.5])
    assert [reward.name for reward in rewards] == ["one", "two"]
    found = RewardCaller(rewards, 0, 5.0, False)(arguments(n=5), 0)
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


LATE = "did not return within rl.reward_timeout_s, 0.2 s"


@pytest.mark.parametrize(
    ("function", "words", "num_failed"),
    [
        (lambda completions: {}["answer"], "it raised KeyError: 'answer'", 4),
        *((function, LATE, 4) for function in (hangs, tries_again, catches_all, waits_forever)),
        *((each, "raised SystemExit: no model", 4) for each in (exits, lambda completions: sys.exit("no model"))),
        *((each, "expected 4 rewards...got 1", 4) for each in (one_reward, lambda completions: [1.0])),
        (lambda completions: [1.0, math.nan, 3.0, "much"], "got nan for completion 1", 2),
        (lambda completions: 3, "expected a list of 4 numbers, got int", 4),
        (lambda completions: torch.tensor(1.0), "expected a list of 4 numbers, got Tensor", 4),
        (lambda completions: dict.fromkeys(completions, 1.0), "expected a list of 4 numbers, got dict", 4),
        (blocks, LATE, 4),  # last, because it blocks the event loop
    ],
)
def test_a_function_that_fails_is_named_or_left_out(function, words, num_failed, capfd):
    named = f"reward function mine.py:{function.__name__}, prompt 7, rank 3: ..."
    refused(named + words, scored, function, timeout_s=0.2)
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
        (judged_in_training, {"answer": 0, "n": 0}, "'trainer_state': ...completion_ids and ... data.path (answer, n)"),
        (judged_in_training, {"trainer_state": None}, "'answer': ...(trainer_state)"),
        (judged_by_position, {}, "'completions'...positional"),
        (one_reward, {}, None),
        (lambda prompts, completion_ids, n=3, *rest, log_extra=None, **columns: [], {}, None),
        (max, {}, None),  # without a signature
    ],
)
def test_arguments_that_do_not_exist_are_reported(function, columns, words):
    sources = {"data.path": SimpleNamespace(columns=columns)}
    if words is None:
        check_arguments(as_rewards(function), sources)
    else:
        named = f"rl.reward_funcs: mine.py:{function.__name__}: ...{words}"
        refused(named, check_arguments, as_rewards(function), sources)


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_have_no_advantages(scaled):
    for equal in ([0.1] * 7, [math.nan, 3.0], [math.nan] * 3):
        assert not GroupRewards(np.array([equal]), np.array([1.0]), 0).advantages(scaled=scaled).any()


def test_arrays_and_tensors_are_lists_of_rewards():
    wanted = [0.0, 1.0, 2.0, 3.0]
    for kind in (np.arange, torch.arange, range):
        assert scored(lambda completions, kind=kind: kind(4)).rewards.tolist() == wanted


def test_none_leaves_out_a_function_for_a_completion():
    found = scored(lambda completions: [None, 1, 2, None], lambda completions: [None, None, 3, 4], weights=[2.0, 10.0])
    np.testing.assert_array_equal(found.rewards, [math.nan, 2, 34, 40])


PAIRS = {"prompts": ["the sky is ", "a b "], "completions": ["blue", "c and d and e"]}
CHATS = {
    "prompts": [[{"role": "user", "content": text}] for text in PAIRS["prompts"]],
    "completions": [[{"role": "assistant", "content": text}] for text in PAIRS["completions"]],
}


def write_model(path, auto_class=transformers.AutoModelForSequenceClassification, **changes):
    tokenizer = train_tokenizer(iter(PAIRS["prompts"] * 20), 300)
    torch.manual_seed(1)
    settings = SIZES | {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id} | changes
    model = auto_class.from_config(transformers.AutoConfig.for_model("qwen2", **settings))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.eval(), tokenizer


def score_all(path, arguments):
    [function] = functions = load_reward_functions([str(path)], None)
    assert function.name == path.name
    return RewardCaller(functions, 0, 60.0, False)({**arguments, "wanted": [1, 2]}, 0).rewards


def score(model, tokenizer, *texts):
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    return model(torch.tensor([ids])).logits.item()


def test_texts_end_with_the_end_of_sequence_token(tmp_path):
    model, tokenizer = write_model(tmp_path / "model")
    wanted = [score(model, tokenizer, *each, tokenizer.eos_token) for each in zip(*PAIRS.values(), strict=True)]
    assert score_all(tmp_path / "model", PAIRS).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("ends", [False, True], ids=["as the template", "with the turn"])
def test_chats_end_as_those_that_trained_the_model(tmp_path, ends):
    model, tokenizer = write_model(tmp_path / "model", **{ENDS_WITH_TURN: ends})
    chats = [[*prompt, *completion] for prompt, completion in zip(*CHATS.values(), strict=True)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    assert all(text.endswith("<|im_end|>\n") for text in texts)
    wanted = [score(model, tokenizer, text.rstrip() if ends else text) for text in texts]
    assert score_all(tmp_path / "model", CHATS).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"auto_class": transformers.AutoModelForCausalLM}, "stores no weights for score.weight"),
        ({"num_labels": 3}, "a reward model with one label, got ... with 3"),
        ({"max_position_embeddings": 4}, "at most 4 tokens"),
        ({"pad_token_id": -1}, "expected a padding token, ... has -1"),
        ({"vocab_size": 100}, "token ids below 100, got ... resize_token_embeddings("),
    ],
)
def test_other_models_and_longer_texts_are_refused(tmp_path, changes, problem):
    write_model(tmp_path / "model", **changes)
    refused(problem, score_all, tmp_path / "model", PAIRS)


def test_directories_without_a_model_or_a_tokenizer_are_refused(tmp_path):
    refused("config.json, got ... without it: export", load_reward_functions, [str(tmp_path)], None)
    (tmp_path / "config.json").write_text("{}")
    refused("directory of a tokenizer, ...: change rl.reward_funcs", load_reward_functions, [str(tmp_path)], None)


def test_chats_need_a_template_of_the_reward_model(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    refused("/model: 'messages' need a chat template", score_all, tmp_path / "model", CHATS)
