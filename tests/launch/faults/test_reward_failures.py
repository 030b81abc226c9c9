"""Rewards and generation that fail on one rank: a line that names it, exit code 2 or an end of all, nothing left."""

import json
import re

import pytest
from mpi_launch import odc_mpi as launched
from number_words import number_words
from tiny_qwen2 import QWEN2

#: Rewards that fail on rank 1 alone, in its first group; if a file says so, generation there does not go on.
REWARDS = """
import ctypes, os, time
from pathlib import Path

import transformers

RANK = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def stall(processors, *given, call=transformers.LogitsProcessorList.__call__):
    scores = call(processors, *given)
    calls.append(None)
    if len(calls) == 4:
        time.sleep(60)
    return scores


calls = []
if RANK and Path("stall").exists():
    transformers.LogitsProcessorList.__call__ = stall


def raises(completions, **columns):
    if RANK:
        raise KeyError("answer")
    return [1.0] * len(completions)


def too_few(completions, **columns):
    return [1.0] * (len(completions) - RANK)


def hangs_in_c(completions, **columns):
    if RANK:
        for _ in range(60):
            ctypes.CDLL(None).sleep(1)
    return [1.0] * len(completions)
"""


@pytest.fixture
def launch(tmp_path):
    number_words(end=60).save_pretrained(tmp_path / "words")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} 2"}) + "\n" for i in range(8)))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def launch(function, **settings):
        usual = {
            "data.path": "prompts.jsonl",
            "rl.tokenizer": "words",
            "run.objective": "grpo",
            "run.dir": "run",
            "run.steps": 3,
            "rl.reward_funcs": f"rewards.py:{function}",
            "rl.num_generations": 4,
            "rl.max_completion_length": 6,
            "data.minibatch_sequences": 32,
        }
        usual |= {f"model.config.{key}": value for key, value in QWEN2.items()}
        arguments = [f"--{key}={value}" for key, value in (usual | settings).items()]
        return launched(2, "train", *arguments, cwd=tmp_path)

    return launch


def test_a_reward_that_fails_is_named(launch):
    ended = launch("raises")
    assert ended.code == 2 and "Traceback" not in ended.err
    where = r"rank 1: reward function rewards\.py:raises, prompt \d, rank 1: it raised KeyError"
    assert re.search(where, ended.err), ended.err


def test_a_rank_that_waits_says_who_has_groups_in_work(launch):
    """For a function that Python's own time limit cannot interrupt."""
    ended = launch("hangs_in_c", **{"comm.timeout_s": 3, "rl.reward_timeout_s": 600})
    assert ended.code != 0
    waits = r"rank 0 on \S+ waited more than 3 s while waiting for \d+ prompt groups in progress: "
    assert re.search(waits + r".*rank 1 on \S+.*was last seen .*computing rewards of \d+ prompts", ended.err), ended.err


def test_a_rank_that_waits_says_which_token_others_generate(launch, tmp_path):
    (tmp_path / "stall").touch()
    ended = launch("too_few", **{"comm.timeout_s": 3})
    assert ended.code != 0
    waits = r"rank 0 on \S+ waited more than 3 s while waiting for \d+ prompt groups in progress: .*rank 1 on \S+.*"
    assert re.search(waits + r"was last seen .*generating, token \d of 6", ended.err), ended.err
