"""Prompts and completions as reward functions get them."""

import json

from number_words import number_words

from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.models.decoding import Prompt
from odc_mpi.training.rl.prompts import PromptCodec


def test_rewards_get_texts_columns_and_copies_of_tokens(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1 2", "answer": "3"}))
    prompts = PromptDataset(tmp_path / "p.jsonl", number_words(end=60))
    text, row, drawn = PromptCodec(prompts), prompts[0], [[3, 60], [4, 5]]
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
