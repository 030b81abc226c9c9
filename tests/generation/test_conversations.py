"""Prompts become the tokens that training has before a completion; each answer of a chat is that of `generate`."""

import io
import json

import pytest
import transformers
from number_words import number_words
from tiny_qwen2 import QWEN2

from odc_mpi.cli import main as cli
from odc_mpi.data.encoding.encode import encode
from odc_mpi.data.examples import Conversation, PromptCompletion
from odc_mpi.data.tokenizer import TURN_END, train_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.generation.generate import CompletionOutput
from odc_mpi.generation.run import output_record, read_examples, tokenize

QUESTION = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "three"}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four"] * 9, 300)


@pytest.mark.parametrize(
    ("example", "trained"),
    [
        (PromptCompletion("here", "one two ", ""), PromptCompletion("here", "one two ", "three")),
        (Conversation("here", [QUESTION]), Conversation("here", [QUESTION, ANSWER])),
    ],
)
def test_tokens_are_those_before_the_completion(tokenizer, example, trained):
    (request,) = tokenize(tokenizer, [example], stop=[tokenizer.eos_token_id])
    [[encoded]] = encode(tokenizer, [trained])
    first = int(encoded.loss_mask.argmax())
    assert request.prompt.tokens == encoded.tokens[:first].tolist()
    # What training ends a completion with is among what ends one here.
    last = int(encoded.loss_mask.nonzero()[0][-1])
    assert encoded.tokens[last] in request.prompt.stop
    completion = CompletionOutput(0, encoded.tokens[first : last + 1].tolist(), "stop")
    line = output_record(tokenizer, request, completion)
    assert line["completion"] == "three" and line["finish_reason"] == "stop" and line["num_tokens"] == last + 1 - first
    assert next(iter(line)) == ("messages" if isinstance(example, Conversation) else "prompt")


def test_only_conversations_end_with_a_turn(tokenizer):
    (turn_end,) = tokenizer.convert_tokens_to_ids([TURN_END])
    text, chat = tokenize(tokenizer, [PromptCompletion("a", "one", ""), Conversation("b", [QUESTION])], stop=[0])
    assert (text.prompt.number, text.prompt.stop) == (0, (0,))
    assert (chat.prompt.number, chat.prompt.stop) == (1, (0, turn_end))


def test_the_answer_in_a_file_to_train_on_is_left_out(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [[QUESTION], [QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION, ANSWER]]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    example = [one.messages for one in read_examples(None, None, path)]
    assert example == [[QUESTION], [QUESTION], [QUESTION, ANSWER, QUESTION]]


def test_questions_become_conversations():
    example = read_examples(None, ["one", "two"], None)
    assert [one.messages for one in example] == [[{"role": "user", "content": text}] for text in ("one", "two")]
    for given, words in (
        ((None, None, None), "expected one of --prompt TEXT, --chat TEXT, --prompts FILE, got none"),
        (("a", ["b"], None), "got --prompt TEXT and --chat TEXT"),
        ((None, ["a", ""], None), "--chat: expected a text, got an empty string"),
    ):
        with pytest.raises(UserError, match=words):
            read_examples(*given)


TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SIZES = QWEN2 | {"vocab_size": 61, "max_position_embeddings": 24}


@pytest.fixture
def directory(tmp_path):
    config = transformers.AutoConfig.for_model(**SIZES, initializer_range=0.5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = number_words(end=60)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def answers(capsys, monkeypatch, *arguments, lines=""):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    capsys.readouterr()
    assert cli.main([*arguments, "--max-new-tokens", "4"]) == 0
    return capsys.readouterr()


def test_a_conversation(directory, tmp_path, capsys, monkeypatch):
    [first] = answers(capsys, monkeypatch, "generate", directory, "--chat", "3 5").out.splitlines()
    messages = [("user", "3 5"), ("assistant", first), ("user", "7")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}))
    [second] = answers(capsys, monkeypatch, "generate", directory, "--prompts", str(prompts)).out.splitlines()
    long = " ".join(["9"] * 30)
    output = answers(capsys, monkeypatch, "chat", directory, lines=f"3 5\n\n7\n{long}\n3 5")
    assert output.out.splitlines() == [first, second, first]
    assert "max_position_embeddings" in output.err and "a new conversation begins" in output.err
    [system] = answers(capsys, monkeypatch, "chat", directory, "--system", "3", lines="5").out.splitlines()
    assert system == first


def test_parts_of_prompts_that_the_template_leaves_out_are_reported_once(directory, tmp_path, capsys, monkeypatch):
    messages, tools = [{"role": "user", "content": "3 5"}], [{"type": "function", "function": {"name": "add"}}]
    lines = [{"messages": messages}, *2 * [{"messages": messages, "tools": tools}]]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = answers(capsys, monkeypatch, "generate", directory, "--prompts", str(prompts))
    warnings = [line for line in output.err.splitlines() if "WARNING" in line]
    left_out = "`tools` (the chat template leaves it out) is ignored in 2 of 3 prompts"
    assert warnings == [f"odc_mpi: WARNING: --prompts: {left_out}"]


def test_a_model_without_a_template(directory, tmp_path, capsys):
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert cli.main(["chat", directory]) == 2
    assert "expected a tokenizer with a chat template" in capsys.readouterr().err
