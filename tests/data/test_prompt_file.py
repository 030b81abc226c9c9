"""Prompts on disk: tokens as training has them, whatever columns there are, and nothing of a wrong file accepted."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from odc_mpi.data.dataset import Dataset, DatasetWriter, read_tokenizer_files
from odc_mpi.data.prepare import Options
from odc_mpi.data.prompts.file import Prompts
from odc_mpi.data.prompts.prepare import prepare_prompts
from odc_mpi.data.tokenizer import load_tokenizer
from odc_mpi.errors import UserError


@pytest.fixture
def words(tmp_path):
    """The directory of a tokenizer whose words are numbers."""
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="60")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_tokens_texts_and_columns(tmp_path, words):
    chat = {"messages": [{"role": "user", "content": "7 8"}, {"role": "assistant", "content": "9"}], "answer": "9"}
    source = lines(tmp_path / "p.jsonl", {"prompt": "1 2 3", "answer": "6", "level": 2, "completion": "x"}, chat)
    out = tmp_path / "p.h5"
    report = prepare_prompts([source], out, Options(tokenizer=words))
    assert (report.num_prompts, report.num_tokens, report.longest) == (2, 5, 3)
    assert report.columns == ["answer", "completion", "level"] and "2 prompts" in report.describe()
    with Prompts(out) as prompts:
        assert prompts.lengths.tolist() == [3, 2] and prompts.max_token_id == 8
        assert prompts[0] == ([1, 2, 3], "1 2 3", {"answer": "6", "level": 2, "completion": "x"})
        assert prompts[1].tokens == [7, 8] and prompts[1].columns == {"answer": "9"} and prompts[1].is_chat
        # The assistant's own turn is what is to be generated.
        assert prompts[1].prompt == [{"role": "user", "content": "7 8"}]
    assert load_tokenizer(out).get_vocab() == load_tokenizer(words).get_vocab() and read_tokenizer_files(out)


def test_some_are_held_out_and_long_ones_dropped(tmp_path, words):
    source = lines(tmp_path / "p.jsonl", *({"prompt": f"{i} {i + 1}"} for i in range(40)), {"prompt": "1 " * 9})
    out = tmp_path / "p.h5"
    report = prepare_prompts([source], out, Options(tokenizer=words, eval_fraction=0.3, max_length=4))
    assert report.num_dropped == 1 and report.num_prompts + report.num_eval_prompts == 40
    with Prompts(out) as prompts, Prompts(tmp_path / "p.eval.h5") as held_out:
        both = [{prompts[i].prompt for i in range(len(prompts))}, {held_out[i].prompt for i in range(len(held_out))}]
    assert not both[0] & both[1] and len(both[1]) == report.num_eval_prompts > 0


@pytest.mark.parametrize(
    ("record", "changes", "words_of_error"),
    [
        ({"text": "1"}, {}, "expected the field 'prompt' or 'messages'"),
        ({"prompt": ""}, {}, "at least one token"),
        ({"prompt": "1", "prompts": 2}, {}, "columns of other names"),
        ({"prompt": "1", "a": float("nan")}, {}, "columns that JSON can hold"),
        ({"prompt": "1 2 3"}, {"max_length": 2}, "expected prompts to write"),
        ({"prompt": "1"}, {"tokenizer": None}, "expected --tokenizer DIR"),
        ({"prompt": "1"}, {"prompt_field": "q"}, "no --prompt-field"),
        ({"prompt": "1"}, {"num_proc": 2}, "no --num-proc"),
        ({"prompt": "1"}, {"eval_fraction": 0.5}, "change --eval-fraction"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, record, changes, words_of_error):
    source = lines(tmp_path / "p.jsonl", record)
    with pytest.raises(UserError, match=words_of_error):
        prepare_prompts([source], tmp_path / "p.h5", Options(**({"tokenizer": words} | changes)))
    assert not (tmp_path / "p.h5").exists()


def test_sequences_and_prompts_are_not_mistaken_for_each_other(tmp_path, words):
    out, data = tmp_path / "p.h5", tmp_path / "d.h5"
    prepare_prompts([lines(tmp_path / "p.jsonl", {"prompt": "1"})], out, Options(tokenizer=words))
    with pytest.raises(UserError, match=r"set run\.objective to grpo"):
        Dataset(out)
    with DatasetWriter(data, vocab_size=4, tokenizer="", source=""):
        pass
    with pytest.raises(UserError, match="--prompts-only writes one"):
        Prompts(data)
    with pytest.raises(UserError, match="got no file"):
        Prompts(tmp_path / "none.h5")
