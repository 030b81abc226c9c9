"""A chosen answer that is the beginning of the rejected one, or the reverse."""

import numpy as np
import pytest
from record_files import invalid

from odc_mpi.data.encoding.pairs import encode_pairs
from odc_mpi.data.records.parse import parse_example

USER, YES = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
MORE = [YES, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]


def decoded(tokenizer, record):
    """Return the prompt, the chosen and the rejected answer as text."""
    [[pair]] = encode_pairs(tokenizer, [parse_example(record, "here")])
    num_prompt, num_chosen, _ = pair.columns
    return [tokenizer.decode(part) for part in np.split(pair.tokens, [num_prompt, num_prompt + num_chosen])]


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
