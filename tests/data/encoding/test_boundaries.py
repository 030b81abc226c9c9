"""The completion's text follows the prompt's, without a space that the data lack."""

import pytest
from tiny_tokenizers import KINDS, TURN, tiny_tokenizer

from odc_mpi.data.encoding.boundaries import tokenize_pairs

#: Kinds whose tokens keep all text.
EXACT = [kind for kind in KINDS if kind not in ("t5", "wordpiece", "words")]
PAIRS = (("Who is", "me"), ("Who is ", "me"), ("Who is", " me"), ("Who is\n", "me again"), ("Q:", "//me"), ("", "me"))


@pytest.mark.parametrize("kind", EXACT)
def test_no_space_is_inserted(kind):
    tokenizer = tiny_tokenizer(kind)
    for prompt, completion in (*PAIRS, (f"{TURN}me{TURN} ", f"Who is{TURN}"), ("a", ": a"), ("12", "345 ")):
        [prompt_ids], [completion_ids] = tokenize_pairs(tokenizer, [prompt], [completion])
        assert prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        joined = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([*prompt_ids, *completion_ids]) == tokenizer.decode(joined)
        assert completion_ids


def test_words_are_not_joined():
    tokenizer = tiny_tokenizer("wordpiece")
    ids = tokenize_pairs(tokenizer, ["un", "un"], ["a", " a"])
    assert [tokenizer.convert_ids_to_tokens(each) for each in ids[1]] == [["##a"], ["a"]]
