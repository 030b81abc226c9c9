"""The token that ends an answer in a chat template, found by rendering a short conversation."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from odc_mpi.errors import UserError

_QUESTION, _ANSWER = "question 7301", "answer 7302"
_CHAT = (
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "question 7303"},
)


class TurnEnd(NamedTuple):
    """End of an answer in a chat template.

    Attributes:
        token: Special token that ends an answer; "" if the template writes none.
        closing: Text to append to the last answer of a conversation, which ends with `token`. Not empty if the template
            writes the token only when another message follows: to begin the next turn, as in GLM, or between two turns.
        rest: Text to remove from the end of a conversation: what the template writes after the end of the last turn,
            such as a generation prompt that was not requested. Usually empty.
    """

    token: str = ""
    closing: str = ""
    rest: str = ""


def find_turn_end(
    render: Callable[[Sequence[dict[str, Any]]], str],
    special: re.Pattern[str],
    eos_token: str | None,
    bos_token: str | None,
) -> TurnEnd:
    """Find out how a chat template ends an answer, by rendering a short conversation with `render`.

    `special` matches the tokenizer's special tokens. The eos token may follow the end of a turn; the bos token does not
    end one. Returns empty texts if the template rejects the conversation.
    """
    try:
        turn, longer = render(_CHAT[:2]), render(_CHAT)
    except UserError:  # raised again when messages are rendered
        return TurnEnd()
    before, _, tail = turn.rpartition(_ANSWER)
    following = longer.rpartition(_ANSWER)[2]
    opening = before.rpartition(_QUESTION)[2]
    tokens, next_token = [each[0] for each in special.finditer(tail)], special.match(following.lstrip())
    if tokens and following.startswith(tail):
        rest = tail.rpartition(tokens[-1])[2]
        return TurnEnd(tokens[-1], rest=rest if rest.strip() else "")
    is_same = bool(tokens) and next_token is not None and tokens[0] == next_token[0]
    is_prompt = tail.strip() == opening.strip() != "" and not is_same  # the generation prompt, without an end of turn
    if tokens and not is_prompt:
        rest = tail.partition(tokens[0])[2]
        # After the token, Phi 3 writes the end-of-text token, which also stops generation.
        return TurnEnd(tokens[0], rest="" if rest.strip() in ("", eos_token) else rest)
    pairs = zip(tail, following, strict=False)
    num_common = 0 if is_prompt else sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = tail[num_common:] if tail[num_common:].strip() else ""
    if next_token is None or (next_token[0] == bos_token != eos_token):
        return TurnEnd(rest=rest)
    blank = following[: len(following) - len(following.lstrip())]
    return TurnEnd(next_token[0], blank[len(tail) - len(rest) :] + next_token[0], rest)
