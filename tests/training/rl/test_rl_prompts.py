"""Prompts and completions as reward functions get them, and the lengths of completions that are expected."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from number_words import number_words

from odc_mpi.checkpoint.manifest import MANIFEST, FileRecord, Manifest, TensorRecord, shard_name, write_manifest
from odc_mpi.checkpoint.side_files import end_tokens
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.models.decoding import Prompt
from odc_mpi.training.recipes.rollouts.prompts import PromptCodec, predict_lengths


def test_rewards_get_texts_columns_and_copies_of_tokens(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1 2", "answer": "3"}))
    prompts = PromptDataset(tmp_path / "p.jsonl", number_words(end=60))
    text, row, drawn = PromptCodec(prompts, None), prompts[0], [[3, 60], [4, 5]]
    given = text.reward_kwargs(row, drawn)
    assert text.encode(0, row) == Prompt(0, [1, 2], [60])
    assert given == {
        "prompts": ["1 2", "1 2"],
        "completions": ["3", "4 5"],
        "completion_ids": [[3, 60], [4, 5]],
        "answer": ["3", "3"],
    }
    given["completion_ids"][0].pop()  # as of a function that takes the end away
    assert drawn == [[3, 60], [4, 5]]


PROMPTS = np.array([4, 8, 2, 6, 4], dtype=np.int64)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ({}, [4, 8, 2, 6, 4]),  # nothing is known yet: longer prompts first
        ({0: 7.0, 4: 9.0}, [7, 8, 2, 6, 9]),  # all observed prompts have one length: no line
        ({0: 12.0, 1: 20.0}, [12, 20, 8, 16, 12]),
    ],
)
def test_new_prompts_follow_the_observed_ones(observed, expected):
    assert predict_lengths(range(5), PROMPTS, observed) == pytest.approx(expected, abs=1e-9)
    other_order = dict(reversed(observed.items()))
    assert predict_lengths(range(5), PROMPTS, other_order) == predict_lengths(range(5), PROMPTS, observed)


def test_completions_stop_at_the_end_tokens_of_the_base(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    tokenizer = SimpleNamespace(eos_token_id=2)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert end_tokens(tokenizer, tmp_path) == [2, 7]
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert end_tokens(tokenizer, tmp_path) == [2, 9], "as transformers does"
    assert end_tokens(tokenizer, None) == [2]
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    metadata = {"config": {"model": {"path": str(tmp_path)}}}
    tensors = {"model/x": TensorRecord("trainable", "float32", (3,), ((0, 0, 3),))}
    files = {shard_name(1, 0): FileRecord(1, 1)}
    write_manifest(checkpoint / MANIFEST, Manifest(1, 1, tensors, {}, "AdamW", metadata, files))
    assert end_tokens(tokenizer, checkpoint) == [2, 9], "those of the base of the run"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1 2"}))
    codec = PromptCodec(prompts := PromptDataset(tmp_path / "p.jsonl", number_words(end=60)), str(checkpoint))
    assert codec.encode(0, prompts[0]).stop == [60, 9]
