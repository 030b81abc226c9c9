"""Prompts become the tokens that training has before a completion, and end where training ends."""

import json

import pytest

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
