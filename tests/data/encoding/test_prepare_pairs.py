"""Preference data from files to a data set: tokens, masks, truncation, invalid and mixed records, and the report."""

import copy

import numpy as np
import pytest
from record_files import invalid, write_lines
from user_errors import refused, says

from odc_mpi.cli import main as cli
from odc_mpi.data import prepare as module
from odc_mpi.data.dataset.reader import Dataset, verify_dataset
from odc_mpi.data.encoding.groups import encode_groups
from odc_mpi.data.prepare import PrepareOptions, eval_output_path
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.tokenizer import load_tokenizer

END = "<|endoftext|>"


def prepare(source, out, **options):
    return module.prepare([source], out, PrepareOptions(**options))


def encode_record(tokenizer, record):
    [[pair]] = encode_groups(tokenizer, [parse_example(record, "here")])
    return pair


def decode(tokenizer, pair):
    """The texts of the prompt and of both answers, with the loss tokens of the answers in brackets."""
    texts = [tokenizer.decode(pair.prompt)]
    for answer in pair.answers:
        runs = np.split(np.arange(len(answer.tokens)), 1 + np.flatnonzero(np.diff(answer.loss_mask)))
        decoded = [(tokenizer.decode(answer.tokens[run]), answer.loss_mask[run[0]]) for run in runs]
        texts.append("".join(f"[{text}]" if has_loss else text for text, has_loss in decoded))
    return texts


def test_the_parts_of_pairs_of_texts(tokenizer):
    record = {"prompt": "Sum:\n", "chosen": "is 4", "rejected": "is five"}
    assert decode(tokenizer, encode_record(tokenizer, record)) == ["Sum:\n", f"[is 4{END}]", f"[is five{END}]"]
    # Without a prompt it is what the tokens have in common, except the last token of a text that ends there.
    texts = {"chosen": "\n\nHuman: Sum?\n\nAssistant: four", "rejected": "\n\nHuman: Sum?\n\nAssistant: four, no five"}
    expected = ["\n\nHuman: Sum?\n\nAssistant: fo", f"[ur{END}]", f"[ur, no five{END}]"]
    assert decode(tokenizer, encode_record(tokenizer, texts)) == expected


def test_the_parts_of_pairs_of_conversations(tokenizer):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    chosen, rejected = ([*turns, {"role": "assistant", "content": text}, turns[2]] for text in "de")
    start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    prompt = f"{start}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    # The user's last message, and the line break after the end of a turn, have no effect on the loss.
    record = {"chosen": chosen, "rejected": rejected}
    assert decode(tokenizer, encode_record(tokenizer, record)) == [prompt, "[d<|im_end|>]", "[e<|im_end|>]"]
    record = {"prompt": "a", "chosen": [turns[1], *chosen[2:4]], "rejected": "e"}
    between = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    answers = [f"[b<|im_end|>]{between}[d<|im_end|>]", "[e<|im_end|>]"]
    pair = encode_record(tokenizer, record)
    assert decode(tokenizer, pair) == [start, *answers]
    # Nor has what truncation leaves of the user's message.
    answers[0] = "[b<|im_end|>]"
    assert decode(tokenizer, pair.truncate(pair.length - len(pair.answers[1].tokens))) == [start, *answers]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "two different answers, got the same tokens for both"),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "b"}, "two different answers"),
        ({"chosen": "a", "rejected": "b"}, "expected a prompt, got chosen and rejected that begin with different"),
    ],
)
def test_unusable_pairs(tokenizer, record, words):
    invalid(f"here: ...{words}", encode_record, tokenizer, record)


def test_a_template_that_changes_earlier_answers(tokenizer):
    """It serves for one turn after any context, but not for answers of several turns."""
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' }}{% if loop.last and m.role == 'assistant' %}{{ '<t>' }}{% endif %}"
        "{{ m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    record = {"prompt": turns, "chosen": "d", "rejected": "e"}
    assert decode(thinking, encode_record(thinking, record)) == ["u:a\na:b\nu:c\na:", "[<t>d\n]", "[<t>e\n]"]
    record["chosen"] = [{"role": "assistant", "content": "d"}, turns[0], turns[1]]
    invalid("here: ...got several turns, ...--chat-template FILE", encode_record, thinking, record)


def letters(num_prompt, num_chosen, num_rejected):
    """A pair with that many tokens of prompt and answers, without their ends."""
    parts = (("prompt", num_prompt, 1), ("chosen", num_chosen, 1), ("rejected", num_rejected, 9))
    return {name: "".join(chr(first + i % 8) for i in range(count)) for name, count, first in parts}


def counts(path):
    """Tokens of the prompt and the answers, all of which have loss."""
    with Dataset(path) as dataset:
        prompts, chosen, num_loss = dataset.columns.values()
        assert (chosen == num_loss).all()
        return list(map(tuple, np.stack([prompts, chosen, dataset.lengths - prompts - chosen], 1).tolist()))


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_each_side_is_truncated(prepared, overlong):
    equal_there = {"prompt": "\x01\x02", "chosen": "\x03" * 9 + "a", "rejected": "\x03" * 9 + "b"}
    sizes = [(3, 2, 4), (3, 4, 9), (3, 20, 20), (8, 1, 1), (7, 9, 1), (9, 1, 1)]
    report = prepared(*(letters(*each) for each in sizes), equal_there, max_length=8, overlong=overlong)
    assert counts(report.path) == [(3, 3, 5), (3, 5, 5), (3, 5, 5), (7, 1, 1)]
    assert (report.num_sequences, report.num_truncated, report.num_truncated_tokens) == (4, 3, 5 + 32 + 10)
    assert (report.num_untrained_dropped, report.num_dropped, report.longest) == (0, 3, 13)
    assert "\n3 dropped: longer than --max-length (" in report.describe()
    assert "sequences" not in report.describe()


def test_overlong_pairs_are_dropped(prepared):
    report = prepared(letters(3, 4, 4), letters(3, 4, 5), letters(3, 9, 1), max_length=8, overlong="drop")
    assert counts(report.path) == [(3, 5, 5)]
    assert (report.num_dropped, report.num_dropped_tokens) == (2, 3 + 5 + 6 + 3 + 10 + 2)


def test_invalid_pairs_are_skipped_and_the_report_counts_pairs(prepared):
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    records = [letters(3, 4, 1), equal, letters(5, 1, 2), {"prompt": "a", "chosen": "", "rejected": "b"}]
    refused("a.jsonl, line 2: ... --bad-lines skip", prepared, *records)
    report = prepared(*records, bad_lines="skip")
    assert (report.num_sequences, report.num_bad_lines, report.num_prompt_tokens) == (2, 2, 8)
    figures = f"{report.path}: 2 pairs, 20 tokens (12 loss tokens, 40% in prompts"
    assert report.describe().startswith(figures) and "longest 10\n" in report.describe()
    assert "2 pairs, 20 tokens" in verify_dataset(report.path)


@pytest.mark.slow
def test_pairs_of_several_processes_are_held_out_alike(stdlib_report, tmp_path):
    records = [{"prompt": f"How many {i}?", "chosen": f"{i}.", "rejected": f"{i + 1}!"} for i in range(1500)]
    source = write_lines(tmp_path / "a.jsonl", *records)
    files = []
    for num_proc in (1, 2):
        out = tmp_path / str(num_proc) / "a.h5"
        report = prepare(source, out, tokenizer=stdlib_report.path, num_proc=num_proc, eval_fraction=0.2)
        assert report.num_proc == num_proc
        files.append([out.read_bytes(), eval_output_path(out).read_bytes()])
    assert files[0] == files[1]
    assert report.num_sequences + report.num_eval_sequences == 1500 and 200 < report.num_eval_sequences < 400


def test_pairs_and_other_examples_are_not_mixed(stdlib_report, tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", *[letters(3, 2, 1)] * 3)
    texts = write_lines(tmp_path / "texts.jsonl", *[{"text": "a b"}] * 3)
    both = write_lines(tmp_path / "both.jsonl", {"text": "a b"}, 3, letters(3, 2, 1), {"text": "c"})
    labels = write_lines(tmp_path / "labels.jsonl", {"prompt": "a ", "completion": "b", "label": False})
    other, pair = "an example without chosen and rejected, and without a label", "a pair of answers"
    for sources, words in (
        ([pairs, texts], f"texts.jsonl, line 1: got {other}...{pairs}, line 1 is {pair}"),
        ([texts, pairs], f"pairs.jsonl, line 1: got {pair}, but {texts}, line 1 is {other}"),
        ([both], f"both.jsonl, line 3: got {pair}, but {both}, line 1 is {other}"),
        ([labels, texts], f"texts.jsonl, line 1: got {other}...{labels}, line 1 is an answer with a label"),
    ):
        options = PrepareOptions(tokenizer=stdlib_report.path, bad_lines="skip")
        refused(f"{words}...with --columns", module.prepare, sources, tmp_path / "a.h5", options)
    # Weights mix several sources of pairs.
    more = write_lines(tmp_path / "more.jsonl", *[letters(3, 2, 5)] * 3)
    mixed = module.prepare([f"{pairs}:1", f"{more}:1"], tmp_path / "a.h5", PrepareOptions(vocab_size=260))
    assert f"{more}: 3 pairs (50.0%), " in mixed.describe()


def test_show_separates_both_answers(tmp_path, capsys):
    chat = [{"role": "user", "content": "Is it?"}]
    record = {"prompt": chat, "chosen": "Yes.\x1b", "rejected": "No, lalala lala."}
    source = write_lines(tmp_path / "a.jsonl", *[record] * 5)
    command = ["prepare", source, "--out", str(tmp_path / "a.h5"), "--vocab-size", "290", "--show", "1"]
    assert cli.main(command) == 0
    _, head, shown = capsys.readouterr().out.partition("\npair 0: ")
    words = "<|im_start|>user...Is it?<|im_end|>...<|im_start|>assistant...--- chosen: ...[[Yes.\\x1b<|im_end|>]]"
    says(shown.replace("\n", " "), f"{words}...--- rejected: ...[[No, lalala lala.<|im_end|>]]")
    assert head
    assert len(load_tokenizer(tmp_path / "a.h5")("lala")["input_ids"]) == 1, "trained on both answers"


USER, YES = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
MORE = [YES, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]


def decoded(tokenizer, record):
    """Return the prompt, the chosen and the rejected answer as text."""
    [[pair]] = encode_groups(tokenizer, [parse_example(record, "here")])
    return [tokenizer.decode(part) for part in (pair.prompt, *(answer.tokens for answer in pair.answers))]


@pytest.mark.parametrize("names", [("chosen", "rejected"), ("rejected", "chosen")])
def test_the_shorter_answer_has_text(tokenizer, names):
    texts = dict(zip(names, (" it", " it is that"), strict=True))
    expected = [f"{texts[name]}{tokenizer.eos_token}" for name in ("chosen", "rejected")]
    assert decoded(tokenizer, {"prompt": "is", **texts}) == ["is", *expected]
    assert decoded(tokenizer, {name: f"is{text}" for name, text in texts.items()}) == ["is", *expected]
    chats = dict(zip(names, ([YES], MORE), strict=True))
    explicit = decoded(tokenizer, {"prompt": [USER], **chats})
    assert explicit == decoded(tokenizer, {name: [USER, *messages] for name, messages in chats.items()})
    assert all("Yes." in answer for answer in explicit[1:])


def test_an_answer_without_text_is_refused(tokenizer):
    """Also a shorter text of one token, which would be the prompt."""
    for record in ({"prompt": "is", "chosen": "", "rejected": " it"}, {"chosen": "is", "rejected": "is it"}):
        invalid("expected a", decoded, tokenizer, record)
