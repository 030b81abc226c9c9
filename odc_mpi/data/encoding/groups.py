"""Tokenizing prompts with answers: pairs of a chosen and a rejected answer, and answers with labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from odc_mpi.data.encoding.encode import Encoded, encode, trimmed
from odc_mpi.data.examples import ExampleGroup
from odc_mpi.data.prompt_group import Answer
from odc_mpi.data.records.fields import InvalidRecordError

_SEVERAL_TURNS = (
    "{}: expected one assistant message {}, got several turns, of which this chat template renders only the last as it "
    "is trained: shorten them, or replace the template with --chat-template FILE"
)


def encode_groups(tokenizer: Any, groups: Sequence[ExampleGroup]) -> list[list[Encoded]]:
    """Tokenize prompts with answers. Returns, for each, a list that contains one `Encoded`.

    Each answer is encoded together with its prompt (see `encode`). The prompt of an answer with a label ends at the
    first loss token. That of a pair consists of the tokens that both sequences begin with, up to the first loss token
    of either sequence or, for texts without a prompt, up to the first difference. Each answer has at least one token.
    Raises the errors of `encode`, and an `InvalidRecordError` if the chat template requires one sequence per turn, if
    the answers of a pair are equal, or if there is no prompt.
    """
    sides = iter(encode(tokenizer, [example for group in groups for example in group.examples]))
    return [[_join(group, [next(sides) for _ in group.examples])] for group in groups]


def _join(group: ExampleGroup, sides: list[list[Encoded]]) -> Encoded:
    """Join sequences, each of which contains the prompt and one answer, into a prompt with its answers."""
    if any(len(parts) > 1 for parts in sides):
        place = "after the messages that chosen and rejected share" if group.label is None else "in completion"
        raise InvalidRecordError(_SEVERAL_TURNS.format(group.location, place))
    answers = [encoded.answers[0] for [encoded] in sides]
    is_plain_text = sides[0][0].is_plain_text
    if group.label is None:
        answers = trimmed(answers)
        num_prompt = _num_shared_tokens(group.location, *answers, is_plain_text=is_plain_text)
    else:
        answers = [answers[0]._replace(columns={"label": np.array(group.label)})]
        num_prompt = 0 if is_plain_text else int(answers[0].loss_mask.argmax())
        if not num_prompt:
            raise InvalidRecordError(f"{group.location}: expected a prompt, got an empty one: add text to 'prompt'")
    return Encoded(
        answers[0].tokens[:num_prompt],
        [answer.part(num_prompt, None) for answer in answers],
        notes=tuple(note for [encoded] in sides for note in encoded.notes),
    )


def _num_shared_tokens(location: str, chosen: Answer, rejected: Answer, *, is_plain_text: bool) -> int:
    """Return the number of tokens in the prompt of a pair, given two sequences that contain it."""
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise InvalidRecordError(f"{location}: expected two different answers, got the same tokens for both")
    # Texts without a prompt have loss from their beginning. If one text is the beginning of the other, its last token
    # before the end is an answer, as in TRL.
    num_prompt = min(
        max(0, len(each.tokens) - 2) if is_plain_text else int(each.loss_mask.argmax()) for each in (chosen, rejected)
    )
    differing = np.flatnonzero(chosen.tokens[:num_prompt] != rejected.tokens[:num_prompt])
    num_prompt = int(differing[0]) if len(differing) else num_prompt
    if not num_prompt:
        raise InvalidRecordError(
            f"{location}: expected a prompt, got chosen and rejected that begin with different tokens: add the field "
            "'prompt'"
        )
    return num_prompt
