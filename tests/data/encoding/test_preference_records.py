"""The forms of published preference data, as records."""

import pytest
from record_files import invalid

from odc_mpi.data.examples import Conversation, PreferencePair, PromptCompletion
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example

USER = {"role": "user", "content": "Which color?"}
BLUE, GREEN = ({"role": "assistant", "content": content} for content in ("Blue.", "Green."))
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "Again?"}


def parse_pair(record, **columns):
    pair = parse_example(record, "here", columns)
    assert isinstance(pair, PreferencePair) and pair.location == "here"
    return pair


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "a ", "chosen": "b", "rejected": "c", "score_chosen": 3, "label": 0}, "a ", "b", "c"),
        ({"prompt": "a ", "chosen": "b", "rejected": "c", "completion": "d", "text": "e"}, "a ", "b", "c"),
        # hh-rlhf
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}, "",
         "\n\nHuman: Hi\n\nAssistant: Yes", "\n\nHuman: Hi\n\nAssistant: No"),
    ],
)  # fmt: skip
def test_pairs_of_texts(record, prompt, chosen, rejected):
    expected = PreferencePair(*(PromptCompletion("here", prompt, text) for text in (chosen, rejected)))
    assert parse_pair(record) == expected


@pytest.mark.parametrize(
    ("record", "context", "chosen", "rejected"),
    [
        ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, [USER], [BLUE], [GREEN]),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER], [BLUE], [GREEN]),
        ({"chosen": [SYSTEM, USER, BLUE, AGAIN, BLUE], "rejected": [SYSTEM, USER, BLUE, AGAIN, GREEN]},
         [SYSTEM, USER, BLUE, AGAIN], [BLUE], [GREEN]),
        # One is the beginning of the other.
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE, AGAIN, GREEN]}, [USER], [BLUE], [BLUE, AGAIN, GREEN]),
        # Answers of several turns.
        ({"chosen": [USER, BLUE, AGAIN, BLUE], "rejected": [USER, GREEN, AGAIN, GREEN]},
         [USER], [BLUE, AGAIN, BLUE], [GREEN, AGAIN, GREEN]),
        # UltraFeedback binarized: the prompt also as text, and the chosen answer as a conversation.
        ({"prompt": "Which color?", "prompt_id": "1f", "chosen": [USER, BLUE], "rejected": [USER, GREEN],
          "messages": [USER, BLUE], "score_chosen": 8.5, "score_rejected": 7.0}, [USER], [BLUE], [GREEN]),
        ({"prompt": [USER], "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?\n", "chosen": [SYSTEM, USER, BLUE], "rejected": [SYSTEM, USER, GREEN]},
         [SYSTEM, USER], [BLUE], [GREEN]),
        # The prompt differs from the beginning of the answers.
        ({"prompt": [USER, BLUE], "chosen": [AGAIN, BLUE], "rejected": [AGAIN, GREEN]},
         [USER, BLUE, AGAIN], [BLUE], [GREEN]),
        # Texts and messages.
        ({"prompt": [USER], "chosen": "Blue.", "rejected": "Green."}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": [BLUE], "rejected": [GREEN]}, [USER], [BLUE], [GREEN]),
        ({"prompt": [USER], "chosen": BLUE, "rejected": GREEN}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": "Blue.", "rejected": "Green.", "system": "Be brief."},
         [SYSTEM, USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": "Blue.", "rejected": "Green.", "system": ""}, [USER], [BLUE], [GREEN]),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN], "system": "Be brief."}, [SYSTEM, USER], [BLUE], [GREEN]),
        # LLaMA-Factory
        ({"conversations": [{"from": "human", "value": "Which color?"}], "chosen": {"from": "gpt", "value": "Blue."},
          "rejected": {"from": "gpt", "value": "Green."}}, [USER], [BLUE], [GREEN]),
        ({"instruction": "Which", "input": "color?", "chosen": "Blue.", "rejected": "Green."},
         [USER | {"content": "Which\n\ncolor?"}], [BLUE], [GREEN]),
    ],
)  # fmt: skip
def test_pairs_of_conversations(record, context, chosen, rejected):
    pair = parse_pair(record)
    for side, answer in ((pair.chosen, chosen), (pair.rejected, rejected)):
        assert isinstance(side, Conversation)
        assert side.messages == [*context, *answer]
        trained = [message["content"] for i, message in enumerate(side.messages) if side.message_has_loss(i)]
        assert trained == [message["content"] for message in answer if message["role"] == "assistant"]


def test_tools_and_flags_of_pairs():
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"prompt": "Which color?", "chosen": [BLUE], "rejected": "Green.", "tools": tools}
    pair = parse_pair(record)
    assert isinstance(pair.chosen, Conversation) and isinstance(pair.rejected, Conversation)
    assert pair.chosen.tools == pair.rejected.tools == tools
    chosen = [USER, BLUE | {"weight": 0}, AGAIN, BLUE]
    pair = parse_pair({"chosen": chosen, "rejected": [USER, GREEN]})
    assert [pair.chosen.message_has_loss(i) for i in range(4)] == [False, False, False, True]


def test_columns_of_pairs():
    orca = {"system": "Be brief.", "question": "Which color?", "chosen": "Blue.", "rejected": "Green."}
    pair = parse_pair(orca, prompt="question")
    assert pair.chosen == Conversation("here", [SYSTEM, USER, BLUE])
    assert parse_pair(orca, instruction="question") == pair
    texts = {"prompt": "a", "chosen_response": "b", "rejected_response": "c", "messages": [USER, BLUE]}
    expected = PreferencePair(PromptCompletion("here", "a", "b"), PromptCompletion("here", "a", "c"))
    assert parse_pair(texts, chosen="chosen_response", rejected="rejected_response") == expected
    del texts["prompt"]
    implicit = PreferencePair(PromptCompletion("here", "", "b"), PromptCompletion("here", "", "c"))
    assert parse_pair(texts, chosen="chosen_response", rejected="rejected_response") == implicit
    # Renaming a field to itself selects another format of the same record.
    assert parse_example(orca | {"messages": [USER, BLUE]}, "here", {"messages": "messages"}) == Conversation(
        "here", [SYSTEM, USER, BLUE]
    )
    assert parse_example(texts, "here", {"text": "chosen_response"}) == PromptCompletion("here", "", "b")
    invalid("'better', got 'system', ...: change --columns", parse_pair, orca, chosen="better")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "or 'chosen' and 'rejected', got 'prompt', 'chosen': name yours"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "expected an answer with text in 'chosen', got none"),
        ({"prompt": [USER], "chosen": [BLUE], "rejected": []}, "expected an answer with text in 'rejected', got none"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "expected 'chosen' to be a list of objects, got a number"),
        ({"chosen": "a b", "rejected": [BLUE]}, "expected a prompt, got 'chosen' and 'rejected' without a message"),
        ({"chosen": [USER, BLUE], "rejected": [AGAIN, GREEN]}, "expected a prompt, got"),
        ({"prompt": "Hi", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, "before the answer: remove"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "expected the field 'content'"),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "expected text in 'chosen'"),
    ],
)  # fmt: skip
def test_bad_pairs(record, words):
    with pytest.raises(InvalidRecordError, match=words) as caught:
        parse_example(record, "here")
    assert str(caught.value).startswith("here: ") and "\n" not in str(caught.value)
