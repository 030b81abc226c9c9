"""Tokenizing answers with preferences: pairs of a chosen and a rejected answer, and answers with labels.

A pair is the shared prompt, followed by the chosen answer and the rejected answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from odc_mpi.data.dataset.format import LabelColumns, PairCounts
from odc_mpi.data.encoding.encode import Encoded, encode
from odc_mpi.data.examples import LabeledAnswer, PreferencePair
from odc_mpi.data.records.fields import InvalidRecordError

_SEVERAL_TURNS = (
    "{}: expected one assistant message {}, got several turns, of which this chat template renders only the last as it "
    "is trained: shorten them, or replace the template with --chat-template FILE"
)


@dataclass(frozen=True, kw_only=True)
class EncodedPair(Encoded):
    """A tokenized pair: the concatenated tokens of the prompt, the chosen answer and the rejected answer."""

    columns: PairCounts

    @property
    @override
    def length(self) -> int:
        """Total number of tokens in the prompt and the longer answer."""
        return self.columns.num_prompt_tokens + max(len(answer.tokens) for answer in self._answers())

    @property
    @override
    def has_loss(self) -> bool:
        """True if both answers have loss tokens and the answers differ."""
        chosen, rejected = self._answers()
        both = bool(chosen.loss_mask.any() and rejected.loss_mask.any())
        return both and not np.array_equal(chosen.tokens, rejected.tokens)

    @override
    def truncate(self, length: int | None) -> "EncodedPair":
        """Return the pair with answers truncated so that the prompt plus either answer has at most `length` tokens.

        Tokens after the last loss token of each answer are also removed. A prompt longer than `length` is kept.
        """
        num_prompt = self.columns.num_prompt_tokens
        rest = None if length is None else max(0, length - num_prompt)
        return replace(self, **_row(self.tokens[:num_prompt], *(_trim(answer, rest) for answer in self._answers())))

    def _answers(self) -> Iterator[Encoded]:
        begin, middle = self.columns.num_prompt_tokens, sum(self.columns[:2])
        for part in (slice(begin, middle), slice(middle, None)):
            yield Encoded(self.tokens[part], self.loss_mask[part])


def _trim(sequence: Encoded, length: int | None = None) -> Encoded:
    """Return the tokens up to the last loss token of the first `length`, since others do not affect the loss."""
    loss = np.flatnonzero(sequence.loss_mask[:length])
    return sequence.truncate(int(loss[-1]) + 1 if len(loss) else 0)


def encode_pairs(tokenizer: Any, pairs: Sequence[PreferencePair]) -> list[list[Encoded]]:
    """Tokenize pairs. Returns, for each pair, a list that contains one `EncodedPair`.

    Each answer is encoded together with its prompt (see `encode`). The pair's prompt consists of the tokens that both
    sequences begin with, up to the first loss token of either sequence or, for texts without a prompt, up to the first
    difference. Each answer has at least one token. Raises the errors of `encode`, and an `InvalidRecordError` if the
    chat template requires one sequence per turn, or if the two sequences are equal or begin with different tokens.
    """
    sides = encode(tokenizer, [side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return [
        [_join(pair.location, chosen, rejected)]
        for pair, chosen, rejected in zip(pairs, sides[::2], sides[1::2], strict=True)
    ]


def encode_labeled(tokenizer: Any, examples: Sequence[LabeledAnswer]) -> list[list[Encoded]]:
    """Tokenize answers with labels. Returns, for each, a list of one sequence. Its prompt ends at the first loss token.

    Raises the errors of `encode`, and an `InvalidRecordError` if the chat template requires one sequence per turn, or
    if there is no prompt.
    """
    return [
        [_label(example, parts)]
        for example, parts in zip(examples, encode(tokenizer, [each.answer for each in examples]), strict=True)
    ]


def _label(example: LabeledAnswer, parts: list[Encoded]) -> Encoded:
    if len(parts) > 1:
        raise InvalidRecordError(_SEVERAL_TURNS.format(example.location, "in completion"))
    num_prompt = int(parts[0].loss_mask.argmax())
    if parts[0].is_plain_text or not num_prompt:
        raise InvalidRecordError(f"{example.location}: expected a prompt, got an empty one: add text to 'prompt'")
    return replace(parts[0], columns=LabelColumns(num_prompt, int(example.is_desirable)))


def _join(location: str, *sides: list[Encoded]) -> EncodedPair:
    """Join a chosen and a rejected sequence, each of which contains the prompt, into a pair."""
    if any(len(parts) > 1 for parts in sides):
        raise InvalidRecordError(_SEVERAL_TURNS.format(location, "after the messages that chosen and rejected share"))
    (first,), (second,) = sides
    chosen, rejected = _trim(first), _trim(second)
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise InvalidRecordError(f"{location}: expected two different answers, got the same tokens for both")
    # Texts without a prompt have loss from their beginning. If one text is the beginning of the other, its last token
    # before the end is an answer, as in TRL.
    num_prompt = min(
        max(0, len(each.tokens) - 2) if first.is_plain_text else int(each.loss_mask.argmax())
        for each in (chosen, rejected)
    )
    differing = np.flatnonzero(chosen.tokens[:num_prompt] != rejected.tokens[:num_prompt])
    num_prompt = int(differing[0]) if len(differing) else num_prompt
    if not num_prompt:
        raise InvalidRecordError(
            f"{location}: expected a prompt, got chosen and rejected that begin with different tokens: add the field "
            "'prompt'"
        )
    answers = (Encoded(each.tokens[num_prompt:], each.loss_mask[num_prompt:]) for each in (chosen, rejected))
    return EncodedPair(**_row(chosen.tokens[:num_prompt], *answers), notes=(*first.notes, *second.notes))


def _row(prompt: npt.NDArray[np.uint32], chosen: Encoded, rejected: Encoded) -> dict[str, Any]:
    """Return the tokens of a pair, their loss mask and the lengths of the parts as fields of `EncodedPair`."""
    return {
        "tokens": np.concatenate([prompt, chosen.tokens, rejected.tokens]),
        "loss_mask": np.concatenate([np.zeros(len(prompt), np.bool_), chosen.loss_mask, rejected.loss_mask]),
        "columns": PairCounts(len(prompt), len(chosen.tokens), int(chosen.loss_mask.sum())),
    }
