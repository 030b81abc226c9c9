"""Prompts of a file: their tokens, texts and columns, a digest of them, and what is refused."""

import gzip

import pytest
from number_words import number_words
from record_files import write_lines
from user_errors import refused

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import UserError

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
        (tmp_path / "d.h5", "data.eval_path: expected a file of prompts, such as JSON lines .*which is HDF5"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            PromptDataset(path, tokenizer, "data.eval_path")
        assert "\n" not in str(raised.value)
