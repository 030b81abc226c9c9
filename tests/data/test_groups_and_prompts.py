"""Prompts of a file, and prompt groups: their bytes, and packing into microbatches."""

import gzip

import numpy as np
import pytest
from number_words import number_words
from pair_files import random_groups
from record_files import write_lines
from user_errors import refused

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.groups import group_microbatches
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.data.prompt_group import PromptGroup

CHAT = {"messages": [{"role": "user", "content": "7 8"}, {"role": "assistant", "content": "9"}], "answer": "9"}
TEXT = {"prompt": "1 2 3", "answer": "6", "level": 2, "completion": "x"}


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer whose words are numbers."""
    found = number_words(end=60)
    found.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return found


def test_tokens_texts_and_columns(tmp_path, tokenizer):
    prompts = PromptDataset(write_lines(tmp_path / "p.jsonl", TEXT, CHAT), tokenizer)
    assert (len(prompts), prompts.lengths.tolist(), prompts.max_token_id) == (2, [3, 2], 8)
    assert prompts[0] == ([1, 2, 3], "1 2 3", {"answer": "6", "level": 2, "completion": "x"})
    assert prompts[1].tokens == [7, 8] and prompts[1].columns == {"answer": "9", "level": None, "completion": None}
    assert prompts[1].is_chat
    # The assistant's own turn is what is to be generated.
    assert prompts[1].prompt == [{"role": "user", "content": "7 8"}]
    assert prompts.locations[1] == f"{prompts.path}, line 2" and not prompts.ignored


def test_what_the_template_leaves_out_is_counted(tmp_path, tokenizer):
    tools = [{"type": "function", "function": {"name": "9", "parameters": {}}}]
    thought = {"role": "assistant", "content": "9", "reasoning": "5"}
    lines = [TEXT, CHAT, CHAT | {"tools": tools}, {"messages": [*CHAT["messages"][:1], thought, CHAT["messages"][0]]}]
    ignored = PromptDataset(write_lines(tmp_path / "p.jsonl", *lines), tokenizer).ignored
    assert {each.split(" (")[0]: count for each, count in ignored.items()} == {"`tools`": 1, "reasoning of messages": 1}


def test_the_digest_is_of_the_content(tmp_path, tokenizer):
    known = PromptDataset(write_lines(tmp_path / "p.jsonl", TEXT, CHAT), tokenizer).digest()
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress((tmp_path / "p.jsonl").read_bytes()))
    assert PromptDataset(tmp_path / "p.jsonl.gz", tokenizer).digest() == known
    for changed in ([CHAT, TEXT], [TEXT], [TEXT | {"answer": "7"}, CHAT], [TEXT | {"prompt": "1 2 4"}, CHAT]):
        assert PromptDataset(write_lines(tmp_path / "p.jsonl", *changed), tokenizer).digest() != known


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "1"}, "line 1: expected the field 'prompt' or 'messages'"),
        ({"prompt": ""}, "line 1: expected a prompt of at least one token"),
        ({"prompt": "1", "prompts": 2}, "line 1: expected columns without the names"),
        ({"prompt": "1", "a": float("nan")}, "line 1: expected columns that JSON can represent"),
        ({"prompt": "1", "a": "\ud800"}, "line 1: expected columns that JSON can represent"),
    ],
)
def test_errors_in_a_line(tmp_path, tokenizer, record, words):
    refused(words, PromptDataset, write_lines(tmp_path / "p.jsonl", record), tokenizer)


def test_files_without_prompts(tmp_path, tokenizer):
    with DatasetWriter(tmp_path / "d.h5", vocab_size=4, tokenizer="", source=""):
        pass
    for path, words in (
        (tmp_path / "none.jsonl", "none.jsonl, which is not a file"),
        (tmp_path / ("x" * 300), "which cannot be read: File name too long"),
        (write_lines(tmp_path / "empty.jsonl"), "which contains no prompt"),
        (tmp_path / "d.h5", "data.eval_path: expected a file of prompts, such as JSON lines...which is HDF5"),
    ):
        refused(words, PromptDataset, path, tokenizer, "data.eval_path")


GROUPS = random_groups([(5, 3, 4, 2), (7, 6), (30, 5, 5, 5, 20), (1, 1), (2, 9, 1)])


def rows(groups):
    """The tokens and the values of each answer, with its prompt."""
    for group in groups:
        for tokens, loss_mask, columns in group.answers:
            assert loss_mask.all()
            yield group.index, [*group.prompt], [*tokens], [*columns["logps"]], columns["advantage"]


def test_groups_survive_as_bytes():
    assert list(rows(map(PromptGroup.from_bytes, map(PromptGroup.to_bytes, GROUPS)))) == list(rows(GROUPS))
    assert len(GROUPS[2].to_bytes()) < 600 + 9 * GROUPS[2].num_tokens


@pytest.mark.parametrize(
    ("max_tokens", "packs", "num_tokens"),
    [
        (1000, True, [106]),
        (45, True, [27, 45, 50, 14]),  # a prompt of 30 twice
        (40, True, [27, 40, 35, 50, 14]),
        (1000, False, [8, 9, 7, 13, 35, 35, 35, 50, 2, 11, 3]),
    ],
)
def test_microbatches_count_a_prompt_once_and_repeat_it_after_a_split(max_tokens, packs, num_tokens):
    microbatches = list(group_microbatches(GROUPS, max_tokens, packs=packs))
    assert [microbatch.num_input_tokens for microbatch in microbatches] == num_tokens
    found = []
    for microbatch in microbatches:
        assert microbatch.inputs["input_ids"].shape == (1, microbatch.num_input_tokens)
        assert microbatch.num_tokens == len(microbatch.targets)
        bounds, key_bounds = (microbatch.inputs[f"cu_seq_lens_{name}"].tolist() for name in "qk")
        prompts = np.diff(key_bounds) - np.diff(bounds)
        tokens, positions = (microbatch.inputs[name][0].numpy() for name in ("input_ids", "position_ids"))
        begin = 0
        for answer, advantage in enumerate(microbatch.columns["advantage"].tolist()):
            begin = begin if prompts[answer] else bounds[answer]
            is_answer = (microbatch.answers == answer).numpy()
            seen = [*tokens[begin : begin + prompts[answer]], *tokens[bounds[answer] : bounds[answer + 1]]]
            prompt, targets = seen[: -is_answer.sum()], microbatch.targets[is_answer].tolist()
            assert seen == [*prompt, *targets]
            # The logits for a target are at the position before it.
            expected = range(len(prompt) - 1, len(seen) - 1)
            assert positions[microbatch.logit_positions.numpy()[is_answer]].tolist() == [*expected]
            found.append((prompt, targets, microbatch.columns["logps"][is_answer].tolist(), advantage))
    assert found == [(prompt, answer, logps, advantage) for _, prompt, answer, logps, advantage in rows(GROUPS)]
    indices = [index for microbatch in microbatches for index in microbatch.indices.tolist()]
    assert sorted(set(indices)) == [group.index for group in GROUPS]
