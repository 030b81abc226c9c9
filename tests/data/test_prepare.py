import io
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from record_files import write_lines
from rich.console import Console
from tokenizers import pre_tokenizers
from user_errors import refused

from odc_mpi.data import prepare as module
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.encoding.blocks import FilterCounts, SequenceFilter, _fit
from odc_mpi.data.encoding.encode import Encoded
from odc_mpi.data.prepare import PrepareOptions
from odc_mpi.data.readers import stdlib
from odc_mpi.data.readers.stdlib import StdlibFunction
from odc_mpi.data.tokenizer import load_files, load_tokenizer, tokenizer_files, train_tokenizer

FEW = [StdlibFunction(f'def f{i}(x):\n    "Doc {i}."\n', f"    return x + {i}") for i in range(50)]


@pytest.fixture
def few_functions(monkeypatch):
    """A small standard library, where the real one adds nothing but time."""
    monkeypatch.setattr(stdlib, "functions", lambda: iter(FEW))


def prepare(source, out, console=None, **options):
    return module.prepare([source], out, PrepareOptions(**options), console)


def pairs(*lengths):
    """Lines that become sequences of that many tokens: a prompt of 2, a completion, an end."""
    return [{"prompt": "\x01\x02", "completion": "".join(map(chr, range(3, length)))} for length in lengths]


def test_the_standard_library(stdlib_report, tokenizer, stdlib_samples):
    report = stdlib_report
    assert (report.num_truncated, report.num_dropped, report.num_untrained_dropped) == (0, 0, 0)
    trained = "trained on stdlib, with a plain chat template (ChatML)"
    assert f"\ntokenizer: 2,048 tokens, {trained}, stored in {report.path}" in report.describe()
    with Dataset(report.path) as dataset:
        assert len(dataset) == len(stdlib_samples) == report.num_sequences
        assert (dataset.vocab_size, report.num_tokens) == (2048, dataset.lengths.sum())
        assert report.num_trained_tokens == dataset.num_trained_tokens.sum()
        assert report.longest == dataset.lengths.max() > 10 * np.median(dataset.lengths), "a heavy tail"
        assert dataset.max_token_id < 2048
        for i in range(0, len(stdlib_samples), 97):
            tokens, mask = dataset[i]
            prompt, completion = stdlib_samples[i]
            assert tokenizer.decode(tokens) == f"{prompt}{completion}<|endoftext|>"
            assert tokenizer.decode(tokens[mask]) == f"{completion}<|endoftext|>"


def test_the_trained_tokenizer_loses_nothing(tokenizer):
    assert tokenizer.pad_token == "<|pad|>"
    for text in ("naïve 🙂\t\r\n\0  x", " leading", "<|im_start|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_without_a_tokenizer_one_is_trained_on_the_lines(tmp_path):
    chat = [{"role": "user", "content": "gugugu gugu?"}, {"role": "assistant", "content": "lalala lala"}]
    records = [{"messages": chat}, {"prompt": "mimimi", "completion": "dododo"}, 3, {"messages": []}] * 5
    source = write_lines(tmp_path / "a.jsonl", *records)
    report = prepare(source, tmp_path / "a.h5", vocab_size=300, bad_lines="skip")
    assert (report.num_sequences, report.num_untrained_dropped, report.num_bad_lines) == (10, 5, 5)
    assert f"tokens, trained on {source}, with a plain chat template (ChatML), stored in" in report.describe()
    tokenizer = load_tokenizer(report.path)
    for word in ("gugu", "lala", "mimi", "dodo"):
        assert len(tokenizer(word)["input_ids"]) == 1, "trained on every text"
    with Dataset(report.path) as dataset:
        tokens, mask = dataset[0]
        assert tokenizer.decode(tokens[mask]) == "lalala lala<|im_end|>"
    refused("a.jsonl, line 3: ", prepare, source, tmp_path / "b.h5", vocab_size=300)


def test_truncation_is_counted(prepared):
    records = [*pairs(6, 10, 11, 20), {"prompt": "\x01" * 15, "completion": "x"}]
    dropped = prepared(*records, name="b", max_length=10, overlong="drop")
    assert (dropped.num_sequences, dropped.num_truncated, dropped.num_dropped, dropped.longest) == (2, 0, 3, 10)
    assert "3 dropped: longer than --max-length (48 tokens lost)" in dropped.describe()
    report = prepared(*records, max_length=10)
    assert (report.num_sequences, report.num_truncated) == (4, 2)
    assert (report.num_dropped, report.num_untrained_dropped) == (1, 0), "cut in the prompt"
    assert (report.longest, report.num_tokens) == (10, 36)
    with Dataset(report.path) as dataset:
        assert dataset.lengths.tolist() == [6, 10, 10, 10]
        complete, truncated = dataset[1], dataset[3]
        assert (complete[0][:9] == truncated[0][:9]).all() and complete[0][9] != truncated[0][9]
        assert truncated[1].tolist() == [False] * 2 + [True] * 8
    assert "2 truncated to --max-length (11 tokens lost)\n1 dropped: longer than" in report.describe()


def test_plain_texts_can_be_split(prepared):
    report = prepared({"text": "\x01\x02\x03" * 9}, *pairs(20), max_length=10, overlong="split")
    assert (report.num_sequences, report.num_split, report.num_truncated, report.num_truncated_tokens) == (4, 1, 1, 10)
    assert "1 texts split into sequences of --max-length\n1 truncated" in report.describe()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_each_part_of_a_split_text_begins_with_bos(adds_bos):
    """Or else with the last token of the previous part, which has no loss there."""
    counts, tokens = FilterCounts(), np.arange(8, dtype=np.uint32)
    text = Encoded.sequence(tokens, tokens >= adds_bos, is_plain_text=True, starts_with_bos=adds_bos)
    parts = list(_fit(text, SequenceFilter(4, "split"), counts))
    expected = [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7]] if adds_bos else [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]
    assert [part.tokens.tolist() for part in parts] == expected
    assert all(part.loss_mask.tolist() == [False, *[True] * (part.length - 1)] for part in parts)


def test_what_only_the_first_token_would_teach_is_dropped():
    counts, tokens = FilterCounts(), np.arange(3, dtype=np.uint32)
    for last in (False, True):
        assert (
            len(list(_fit(Encoded.sequence(tokens, np.array([True, False, last])), SequenceFilter(), counts))) == last
        )
    assert counts == FilterCounts(num_untrained_dropped=1)


def test_notes_are_written_in_the_same_order_by_all_processes(prepared):
    assert list(prepared({"text": "a"} | dict.fromkeys("dbcaefgh", 1)).notes) == [f"ignored: `{x}`" for x in "abcdefgh"]


def test_bad_lines_are_skipped_on_request(stdlib_report, tmp_path):
    # The template shows the name, which cannot be tokenized: that is found long after the line was read.
    tokenizer = load_tokenizer(stdlib_report.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "t")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    named = [chat[0] | {"name": "\ud800"}, chat[1]]
    records = [{"messages": chat}, {"messages": named}, {}, 3, {"messages": chat}, None]
    source, out = write_lines(tmp_path / "a.jsonl", *records), tmp_path / "a.h5"
    refused(
        "b.jsonl, line 2: ", prepare, write_lines(tmp_path / "b.jsonl", *records[:2]), out, tokenizer=tmp_path / "t"
    )
    report = prepare(source, out, tokenizer=tmp_path / "t", bad_lines="skip")
    assert (report.num_sequences, report.num_bad_lines) == (2, 4)
    *_, head, first, second, third, rest = report.describe().splitlines()
    assert (head, rest) == ("4 skipped: invalid", "... and 1 more")
    assert [", line 2" in first, ", line 3" in second, ", line 4" in third] == [True] * 3
    with h5py.File(out) as file:
        assert (file.attrs["num_bad_lines"], file.attrs["num_untrained_dropped"]) == (4, 0)
    source = write_lines(tmp_path / "a.jsonl", *records[1:4])
    words = "3 invalid, the first: ...a.jsonl, line 1: ...: change SOURCE"
    refused(words, prepare, source, out, tokenizer=tmp_path / "t", bad_lines="skip")


def test_nothing_left(prepared, tmp_path):
    refused("2 longer...--max-length (now 9)", prepared, *pairs(10, 11), max_length=9, overlong="drop")
    prompts = [{"prompt": "a" * 20, "completion": "b"}] * 3
    refused("(3 longer than the maximum, 0 without loss tokens", prepared, *prompts, max_length=16)
    silent = {"messages": [{"role": "Assistant", "content": "x"}]}
    refused("1 without loss tokens...completions...of the role assistant", prepared, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.usefixtures("few_functions")
def test_the_tokenizer_is_in_the_data_set(tmp_path):
    first, second = tmp_path / "data.v1", tmp_path / "other.h5"
    report = prepare("stdlib", first, vocab_size=260)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert tokenizer_files(first).keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    again = prepare(write_lines(tmp_path / "a.jsonl", {"text": "x y"}), second, tokenizer=first)
    assert (again.tokenizer, again.vocab_size) == (first, report.vocab_size)
    assert f"tokenizer: 260 tokens, from {first}, stored in {second}" in again.describe()
    assert tokenizer_files(second) == tokenizer_files(first)


def test_tokens_do_not_depend_on_whether_the_tokenizer_is_loaded_beside_its_model(tmp_path):
    """transformers loads any fast tokenizer beside a model of the type qwen2 as Qwen2's, which splits numbers."""
    text = "12345 words"
    trained = train_tokenizer([text] * 9, 300)
    trained.save_pretrained(tmp_path)
    expected = trained(text)["input_ids"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_tokenizer(tmp_path)(text)["input_ids"] == expected, "one of ours splits them, too"
    trained.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = trained.train_new_from_iterator([text] * 9, 300)
    trained.save_pretrained(tmp_path)
    lines = write_lines(tmp_path / "a.jsonl", {"text": text})
    prepare(lines, tmp_path / "a.h5", tokenizer=tmp_path)
    with Dataset(tmp_path / "a.h5") as dataset:
        assert list(dataset[0][0][:-1]) == load_tokenizer(tmp_path)(text)["input_ids"]
    assert load_tokenizer(tmp_path / "a.h5")(text)["input_ids"] == load_tokenizer(tmp_path)(text)["input_ids"]
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    trained.save_pretrained(adapters)
    assert load_tokenizer(adapters)(text)["input_ids"] != load_tokenizer(tmp_path)(text)["input_ids"]
    beside_base = load_files(tokenizer_files(adapters, tmp_path))
    assert beside_base(text)["input_ids"] == load_tokenizer(tmp_path)(text)["input_ids"]
    (tmp_path / "tokenizer.json").unlink()
    refused("got no vocabulary", prepare, lines, tmp_path / "b.h5", tokenizer=tmp_path)


def test_slow_libraries_are_loaded_when_they_are_used():
    slow = {"transformers", "tokenizers", "torch", "mpi4py"}
    code = f"import sys, odc_mpi.data.prepare; sys.exit(len({slow} & {{*sys.modules}}))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)


def test_tokenizers_that_do_not_load(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    source = write_lines(tmp_path / "a.jsonl", *pairs(10))
    # A name that a hub would know.
    refused("data set with a tokenizer, got 'gpt2'", prepare, source, tmp_path / "a.h5", tokenizer=Path("gpt2"))
    (tmp_path / "t").mkdir()
    refused("data set with a tokenizer, got ", prepare, source, tmp_path / "a.h5", tokenizer=tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refused("do not load", prepare, source, tmp_path / "a.h5", tokenizer=tmp_path / "t")


def test_a_failure_in_the_middle_leaves_everything_as_it_was(prepared, tmp_path):
    before = prepared(*pairs(10)).path.read_bytes()
    refused("a.jsonl, line 1001: ", prepared, *pairs(*[10] * 1000), {"text": 3}, force=True)
    assert (tmp_path / "a.h5").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "a.jsonl"]


def test_shows_progress_only_on_a_console(stdlib_report, tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", *pairs(10))
    written = io.StringIO()
    prepare(source, tmp_path / "a.h5", tokenizer=stdlib_report.tokenizer, console=Console(file=written))
    assert "tokenizing" in written.getvalue() and "100%" in written.getvalue()
    prepare(source, tmp_path / "a.h5", tokenizer=stdlib_report.tokenizer)
    assert capsys.readouterr() == ("", "")


def test_a_part_is_held_out_and_stays_so_when_lines_are_added(tmp_path, stdlib_report):
    records = [{"prompt": f"How much is {i} and {i}?", "completion": f"It is {2 * i}."} for i in range(300)]

    def texts(path):
        with Dataset(path) as dataset:
            return [tuple(dataset[i][0].tolist()) for i in range(len(dataset))]

    few = set()
    for name, lines in (("few", records[:150]), ("all", records + records[:20])):
        source = write_lines(tmp_path / f"{name}.jsonl", *lines)
        report = prepare(source, tmp_path / f"{name}.h5", tokenizer=stdlib_report.path, eval_fraction=0.2)
        train, held_out = texts(tmp_path / f"{name}.h5"), texts(tmp_path / f"{name}.eval.h5")
        assert len(train) + len(held_out) == len(lines) and not set(train) & set(held_out)
        assert 0.1 < len(held_out) / len(lines) < 0.3
        assert f"{report.eval_path}: held out {len(held_out)} sequences" in report.describe()
        assert few <= set(held_out) and not few & set(train)
        few = set(held_out)


def test_a_fraction_that_leaves_nothing_for_one_of_both(tmp_path, few_functions):
    refused("50 and 0...--eval-fraction", prepare, "stdlib", tmp_path / "out.h5", eval_fraction=1e-9)
    assert list(tmp_path.iterdir()) == []
