"""Tokenizing examples and computing their loss masks with any fast tokenizer from transformers."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.data.chat.checks import CharSpan, Rendered, find_ignored
from odc_mpi.data.chat.templates import ChatRenderer, SplitTurns
from odc_mpi.data.examples import Conversation, Example, PromptCompletion
from odc_mpi.data.prompt_group import Answer, PromptGroup
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.errors import UserError

#: Texts to put before a completion, of which one is unlikely to share a token with it. The last is before any text.
_CONTEXTS = (":", "a", "")
_OWN_SPECIAL = "bos or eos token in the text, and therefore not added again,"


@dataclass(frozen=True, kw_only=True)
class Encoded(PromptGroup):
    """A tokenized example: a prompt with its answers, or a sequence, which is an answer without a prompt.

    Attributes:
        is_plain_text: True if the sequence is text without a prompt, which may be split into several sequences.
        starts_with_bos: True if the tokenizer begins plain text with the bos token.
        notes: What the report of `prepare` says about the example, such as "ignored: `topic`". The report counts the
            examples with each note.
    """

    index: int = -1  # in no data set yet
    is_plain_text: bool = False
    starts_with_bos: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def sequence(cls, tokens: npt.NDArray[np.uint32], loss_mask: npt.NDArray[np.bool_], **details: Any) -> "Encoded":
        """Return a sequence, given its tokens and loss mask `[length]`, and other attributes."""
        return cls(tokens[:0], [Answer(tokens, loss_mask)], **details)

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Tokens of the prompt and all answers, concatenated as in a data set."""
        return np.concatenate([self.prompt, *(answer.tokens for answer in self.answers)])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True for each loss token in `tokens`."""
        return np.concatenate([np.zeros(len(self.prompt), np.bool_), *(answer.loss_mask for answer in self.answers)])

    @property
    def columns(self) -> dict[str, int]:
        """Columns of the example in a data set, named as in `COLUMNS`."""
        first, num_prompt = self.answers[0], {"num_prompt_tokens": len(self.prompt)}
        if first.columns:
            return num_prompt | {"label": int(first.columns["label"])}
        if len(self.answers) == 1:
            return {}
        num_loss = int(first.loss_mask.sum())
        return num_prompt | {"num_chosen_tokens": len(first.tokens), "num_chosen_loss_tokens": num_loss}

    @property
    def length(self) -> int:
        """Number of tokens that count toward `--max-length`: those of the prompt and the longest answer."""
        return len(self.prompt) + max(len(answer.tokens) for answer in self.answers)

    @property
    def has_loss(self) -> bool:
        """True if each answer has a loss token that is not the first token of all, and no two answers are equal."""
        begin = 0 if len(self.prompt) else 1
        all_trained = all(answer.loss_mask[begin:].any() for answer in self.answers)
        return all_trained and len({answer.tokens.tobytes() for answer in self.answers}) == len(self.answers)

    def truncate(self, length: int | None) -> "Encoded":
        """Return the example with at most `length` tokens in the prompt plus any answer, or all if `length` is None.

        Tokens after the last loss token of each answer of a pair are also removed.
        """
        rest = None if length is None else max(0, length - len(self.prompt))
        answers = [answer.part(None, rest) for answer in self.answers]
        return replace(self, prompt=self.prompt[:length], answers=answers if len(answers) == 1 else trimmed(answers))


def trimmed(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers without the tokens after their last loss token, since these do not affect the loss."""
    return [each.part(None, int(np.flatnonzero(each.loss_mask).max(initial=-1)) + 1) for each in answers]


def encode(tokenizer: Any, examples: Sequence[Example], split_turns: SplitTurns = "auto") -> list[list[Encoded]]:
    """Tokenize examples with a fast tokenizer from transformers, and return the sequences for each example.

    A conversation yields one sequence, or one for each answer to train on (see `split_turns` in `ChatRenderer`). Raises
    a `UserError` if the tokenizer lacks an end-of-sequence token for texts or a chat template for conversations, and an
    `InvalidRecordError` if the template rejects the messages or does not render them in the way `templates` requires.
    """
    pairs = [example for example in examples if isinstance(example, PromptCompletion)]
    chats = [example for example in examples if isinstance(example, Conversation)]
    encoded_pairs = iter(_encode_pairs(tokenizer, pairs))
    encoded_chats = iter(_encode_chats(tokenizer, chats, split_turns))
    return [next(encoded_pairs if isinstance(example, PromptCompletion) else encoded_chats) for example in examples]


def _encode_pairs(tokenizer: Any, pairs: list[PromptCompletion]) -> list[list[Encoded]]:
    """Tokenize prompts and completions so that no token contains text from both."""
    if not pairs:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError("expected a tokenizer with an end-of-sequence token (eos_token), got none: change --tokenizer")
    ids = tokenize_pairs(tokenizer, [pair.prompt for pair in pairs], [pair.completion for pair in pairs])
    start = start_tokens(tokenizer)
    encoded = []
    for pair, prompt, completion in zip(pairs, *ids, strict=True):
        # Texts rendered by a chat template already contain both tokens; whitespace may follow the second.
        has_start = bool(start) and (prompt or completion)[:1] == start
        has_end = pair.completion.rstrip().endswith(tokenizer.eos_token) and tokenizer.eos_token_id in completion
        begin, end = [] if has_start else start, [] if has_end else [tokenizer.eos_token_id]
        tokens = np.array([*begin, *prompt, *completion, *end], dtype=np.uint32)
        mask = np.arange(len(tokens)) >= len(begin) + len(prompt)
        notes = (_OWN_SPECIAL,) if has_start or has_end else ()
        details = {"is_plain_text": not prompt, "starts_with_bos": bool(start), "notes": notes}
        encoded.append([Encoded.sequence(tokens, mask, **details)])
    return encoded


def encode_prompts(tokenizer: Any, examples: Sequence[Example], ignored: Counter[str] | None = None) -> list[list[int]]:
    """Tokenize prompts, and conversations followed by the generation prompt, in the same way as training data.

    `examples` must not be empty. Counts in `ignored` what the chat template leaves out of conversations. Raises a
    `UserError` if there are conversations but no chat template, and an `InvalidRecordError` if the template rejects the
    messages or a prompt has no tokens.
    """
    chats = ChatRenderer(tokenizer)
    texts = [chats.render_prompt(each) if isinstance(each, Conversation) else each.prompt for each in examples]
    for example, text in zip(examples, texts, strict=True):
        if isinstance(example, Conversation) and ignored is not None:
            ignored.update(find_ignored(example, [], [Rendered(text, [])], chats.template(example)))
    ids = tokenize_texts(tokenizer, texts)
    start = start_tokens(tokenizer)
    prompts = [
        encoded if isinstance(each, Conversation) or encoded[: len(start)] == start else [*start, *encoded]
        for each, encoded in zip(examples, ids, strict=True)
    ]
    if [] in prompts:
        location = examples[prompts.index([])].location
        raise InvalidRecordError(f"{location}: expected a prompt of at least one token, got none")
    return prompts


def end_of_turn_token(tokenizer: Any) -> int | None:
    """Return the ID of the special token that ends an assistant turn, or None if no chat template defines one."""
    if not tokenizer.chat_template:
        return None
    token = ChatRenderer(tokenizer).turn_end.token
    return tokenizer.get_added_vocab()[token] if token else None


def start_tokens(tokenizer: Any) -> list[int]:
    """Return a list of the bos token if the tokenizer begins sequences with it, as for Llama, or else an empty list."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _encode_chats(tokenizer: Any, chats: list[Conversation], split_turns: SplitTurns) -> list[list[Encoded]]:
    """Render and tokenize conversations, and find the tokens of the answers by their character offsets."""
    if not chats:
        return []
    renderer = ChatRenderer(tokenizer, split_turns)
    rendered = [renderer.render_answers(chat) for chat in chats]
    batch = tokenizer(
        [each.text for examples in rendered for each in examples],
        add_special_tokens=False,  # the template writes them
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    tokenized = zip(batch["input_ids"], batch["offset_mapping"], strict=True)
    return [
        [
            Encoded.sequence(np.array(ids, dtype=np.uint32), _mask(offsets, each.spans), notes=each.notes)
            for each, (ids, offsets) in zip(examples, tokenized, strict=False)
        ]
        for examples in rendered
    ]


def _mask(offsets: list[CharSpan], spans: list[CharSpan]) -> npt.NDArray[np.bool_]:
    """Return the loss mask: True for tokens that contain at least one character of a span.

    Tokens may extend beyond a span: some tokenizers join a word with the space before it, or the end-of-turn token with
    the line break after it.
    """
    # np.array takes twice as long for a list of tuples.
    bounds = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    ends = bounds[:, 1]
    # Byte-level tokenizers that trim spaces from offsets give a single space an empty range at its end.
    begins = np.minimum(bounds[:, 0], ends - 1)
    mask = np.zeros(len(bounds), dtype=np.bool_)
    for start, stop in spans:
        mask |= (begins < stop) & (ends > start)
    return mask


def tokenize_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts, at least one, with a fast tokenizer from transformers, without adding special tokens."""
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(batch["input_ids"])


def tokenize_pairs(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[list[list[int]]]:
    """Return a list of the tokens of all prompts, and a list of the tokens of all completions.

    A prompt has the same tokens as in generation, where nothing follows it. Byte-level tokenizers use the same tokens
    at the beginning of a text as elsewhere, so completions are tokenized alone. SentencePiece tokenizers insert a space
    at the beginning, and WordPiece begins a word. With these tokenizers, prompt and completion are tokenized together,
    as in TRL, and the completion has the tokens after the prompt's. If one token then contains text from both, the
    completion is tokenized after one of `_CONTEXTS` instead of the prompt.
    """
    prompt_ids = tokenize_texts(tokenizer, prompts)
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if splitter and b'"add_prefix_space":false' in splitter.__getstate__():  # as in tokenizer.json
        return [prompt_ids, tokenize_texts(tokenizer, completions)]
    ids = _tokenize_after(tokenizer, prompts, prompt_ids, completions)
    for context in _CONTEXTS:
        context_ids = tokenize_texts(tokenizer, [context])
        if tokenizer.unk_token_id not in context_ids[0]:  # several unknown characters may become one token
            for i in (i for i, each in enumerate(ids) if each is None):
                ids[i : i + 1] = _tokenize_after(tokenizer, [context], context_ids, completions[i : i + 1])
    return [prompt_ids, [each or [] for each in ids]]


def _tokenize_after(
    tokenizer: Any, contexts: Sequence[str], context_ids: list[list[int]], texts: Sequence[str]
) -> list[list[int] | None]:
    """Return the tokens of each text after a context, or None if a token contains text from both."""
    joined = tokenize_texts(tokenizer, [context + text for context, text in zip(contexts, texts, strict=True)])
    return [
        ids[len(before) :] if ids[: len(before)] == before else None
        for before, ids in zip(context_ids, joined, strict=True)
    ]
