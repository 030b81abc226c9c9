"""Tokenizing examples and computing their loss masks, with any fast tokenizer of transformers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.data.examples import Conversation, Example, InvalidRecordError, PromptCompletion
from odc_mpi.errors import UserError, one_line_message

CharSpan = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A tokenized sequence.

    Attributes:
        tokens: Tokens of the sequence, uint32 [length].
        loss_mask: True for each loss token, bool [length].
        is_plain_text: True for a text without prompt, which may be split.
        starts_with_bos: True if the tokenizer begins plain texts with the bos token.
        has_own_special: True if the text contained the bos or eos token that would have been added.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    is_plain_text: bool = False
    starts_with_bos: bool = False
    has_own_special: bool = False


def encode(tokenizer: Any, examples: Sequence[Example]) -> list[Encoded]:
    """Tokenize examples of both kinds with a fast tokenizer of transformers, in one batch per kind.

    Raises:
        UserError: The tokenizer has no end-of-sequence token (needed for `PromptCompletion`) or no chat template
            (needed for `Conversation`), or the assistant's turns cannot be found in the rendered text.
        InvalidRecordError: The chat template rejects the messages, or renders text that cannot be tokenized.
    """
    pairs = [example for example in examples if isinstance(example, PromptCompletion)]
    chats = [example for example in examples if isinstance(example, Conversation)]
    encoded_pairs = iter(_encode_pairs(tokenizer, pairs))
    encoded_chats = iter(_encode_chats(tokenizer, chats))
    return [next(encoded_pairs if isinstance(example, PromptCompletion) else encoded_chats) for example in examples]


def _encode_pairs(tokenizer: Any, pairs: list[PromptCompletion]) -> list[Encoded]:
    """Tokenize prompts and completions separately, so that no token contains text of both."""
    if not pairs:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError("expected a tokenizer with an end-of-sequence token (eos_token), got none: change --tokenizer")
    texts = [pair.prompt for pair in pairs] + [pair.completion for pair in pairs]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    start = start_tokens(tokenizer)
    encoded = []
    for pair, prompt, completion in zip(pairs, ids[: len(pairs)], ids[len(pairs) :], strict=True):
        # Texts that a chat template rendered contain both tokens already; white space may follow the second.
        has_start = bool(start) and (prompt or completion)[:1] == start
        has_end = pair.completion.rstrip().endswith(tokenizer.eos_token) and tokenizer.eos_token_id in completion
        begin, end = [] if has_start else start, [] if has_end else [tokenizer.eos_token_id]
        tokens = np.array([*begin, *prompt, *completion, *end], dtype=np.uint32)
        mask = np.arange(len(tokens)) >= len(begin) + len(prompt)
        encoded.append(Encoded(tokens, mask, not prompt, bool(start), has_start or has_end))
    return encoded


def encode_prompts(tokenizer: Any, examples: Sequence[Example]) -> list[list[int]]:
    """Tokenize prompts for generation in the same way as training data, and return the tokens of each prompt.

    Args:
        tokenizer: Fast tokenizer of transformers.
        examples: Prompts without completion, and conversations, to which the generation prompt is appended. At least 1.

    Raises:
        UserError: A conversation is given, but the tokenizer has no chat template.
        InvalidRecordError: The chat template rejects the messages, or a prompt has no tokens.
    """
    texts = [render_prompt(tokenizer, each) if isinstance(each, Conversation) else each.prompt for each in examples]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    start = start_tokens(tokenizer)
    prompts = [
        encoded if isinstance(each, Conversation) else [*start, *encoded]
        for each, encoded in zip(examples, ids, strict=True)
    ]
    if [] in prompts:
        location = examples[prompts.index([])].location
        raise InvalidRecordError(f"{location}: expected a prompt of at least one token, got none")
    return prompts


def end_of_turn_token(tokenizer: Any) -> int | None:
    """Return the token that ends an assistant turn. Returns None if turns do not end with a special token."""
    chat = Conversation("", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    try:
        turn = render_prompt(tokenizer, chat, for_generation=False)
    except UserError:  # raised again when messages are rendered
        return None
    ids = tokenizer(turn[: end_of_turn(turn, special_tokens(tokenizer))], add_special_tokens=False)["input_ids"]
    return ids[-1] if ids and ids[-1] in tokenizer.get_added_vocab().values() else None


def start_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that begin each sequence: the bos token if the tokenizer adds it, as Llama's does, or none."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _encode_chats(tokenizer: Any, chats: list[Conversation]) -> list[Encoded]:
    """Tokenize complete conversations, and find the assistant's tokens by their character offsets."""
    if not chats:
        return []
    special = special_tokens(tokenizer)
    rendered = [render_chat(tokenizer, chat, special) for chat in chats]
    batch = tokenizer(
        [text for text, _ in rendered],
        add_special_tokens=False,  # the template writes them
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return [
        Encoded(np.array(ids, dtype=np.uint32), _mask(offsets, spans))
        for ids, offsets, (_, spans) in zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
    ]


def _mask(offsets: list[CharSpan], spans: list[CharSpan]) -> npt.NDArray[np.bool_]:
    """Return the loss mask: True for tokens that contain at least one character of a span.

    Tokens that extend beyond a span are included, since they must be trained: some tokenizers join a turn's first word
    with the blank before it, others join the end-of-turn token with the line break after it.
    """
    # np.array takes twice as long for a list of tuples.
    bounds = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    ends = bounds[:, 1]
    # Byte-level tokenizers that trim blanks from offsets give a single blank an empty range at its end.
    begins = np.minimum(bounds[:, 0], ends - 1)
    mask = np.zeros(len(bounds), dtype=np.bool_)
    for start, stop in spans:
        mask |= (begins < stop) & (ends > start)
    return mask


def render_chat(tokenizer: Any, chat: Conversation, special: tuple[str, ...]) -> tuple[str, list[CharSpan]]:
    """Render a conversation with the chat template, and find the assistant's turns. Raises the errors of `encode`.

    A turn is the text that the template adds for a message, without the generation prompt. This works for every
    template that only appends text for each message, with or without `{% generation %}`.

    Args:
        special: Special tokens of the tokenizer; see `special_tokens`.

    Returns:
        The text, and the character range (begin, end) of each trained turn, including its end-of-turn token.
    """
    trained = [i for i in range(len(chat.messages)) if chat.message_has_loss(i)]
    prompts = _render(tokenizer, chat, trained, for_generation=True)
    turns = _render(tokenizer, chat, sorted({*(i + 1 for i in trained), len(chat.messages)}), for_generation=False)
    text = turns[-1]
    spans: list[CharSpan] = []
    for i, prompt, turn in zip(trained, prompts, turns, strict=False):
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise UserError(
                f"{chat.location}: the chat template rewrites earlier text when message {i + 1} is added, so the "
                "assistant's turns cannot be found: change the tokenizer's chat_template"
            )
        spans.append((len(prompt), end_of_turn(turn, special)))
    return text, spans


def render_prompt(tokenizer: Any, chat: Conversation, *, for_generation: bool = True) -> str:
    """Render messages with the chat template, for the assistant to continue. Raises the errors of `encode`.

    Args:
        for_generation: True to append the generation prompt, which is the beginning of an assistant turn.
    """
    return _render(tokenizer, chat, [len(chat.messages)], for_generation=for_generation)[0]


def _render(tokenizer: Any, chat: Conversation, counts: Sequence[int], *, for_generation: bool) -> list[str]:
    """Render the first `count` messages for each count. An exception in the template raises an InvalidRecordError.

    All counts are rendered in one call, because each call also converts tools and special tokens, which takes as long
    as rendering.
    """
    if not counts:
        return []
    if not tokenizer.chat_template:
        raise UserError(
            f"{chat.location}: 'messages' need a chat template, but the tokenizer has none: use another tokenizer"
        )
    try:
        if 0 in counts:
            raise ValueError("expected a message, got none")
        texts: list[str] = tokenizer.apply_chat_template(
            [chat.messages[:count] for count in counts],
            chat.tools,
            tokenize=False,
            add_generation_prompt=for_generation,
        )
        for text in texts:
            text.encode("utf-8")  # fields besides the content may contain half of a surrogate pair
    except Exception as error:
        raise InvalidRecordError(
            f"{chat.location}: the tokenizer's chat template rejects the messages ({one_line_message(error)})"
        ) from error
    return texts


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokenizer's special and added tokens. The call is slow, since the tokenizer builds a dictionary."""
    return tuple(tokenizer.get_added_vocab())


def end_of_turn(turn: str, special: tuple[str, ...]) -> int:
    """Return the length of a turn up to its end-of-turn token, which is one of `special`, in characters.

    White space after this token, which templates append, is not counted. Without such a token, the turn is counted
    completely.
    """
    stripped = turn.rstrip()
    return len(stripped) if special and stripped.endswith(special) else len(turn)
