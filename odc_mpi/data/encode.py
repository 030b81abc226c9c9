"""Tokenizing examples, with their loss masks. Works with any fast tokenizer of transformers."""

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
    """A tokenized sequence: uint32 [length], and its loss mask, bool [length], True for loss tokens."""

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]


def encode(tokenizer: Any, examples: Sequence[Example]) -> list[Encoded]:
    """Tokenize examples of any kind with a fast tokenizer of transformers, in one batch per kind.

    Raises:
        UserError: The tokenizer has no end-of-sequence token (for pairs) or no chat template (for conversations), or
            the assistant's turns cannot be found in the rendered text.
        InvalidRecordError: The template rejects the messages, or its text cannot be tokenized.
    """
    pairs = [example for example in examples if isinstance(example, PromptCompletion)]
    chats = [example for example in examples if isinstance(example, Conversation)]
    encoded_pairs = iter(_encode_pairs(tokenizer, pairs))
    encoded_chats = iter(_encode_chats(tokenizer, chats))
    return [next(encoded_pairs if isinstance(example, PromptCompletion) else encoded_chats) for example in examples]


def _encode_pairs(tokenizer: Any, pairs: list[PromptCompletion]) -> list[Encoded]:
    """Tokenize prompts and completions separately, so that no token contains the border where the loss begins."""
    if not pairs:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError("expected a tokenizer with an end-of-sequence token (eos_token), got none: change --tokenizer")
    texts = [pair.prompt for pair in pairs] + [pair.completion for pair in pairs]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    start = start_tokens(tokenizer)
    encoded = []
    for prompt, completion in zip(ids[: len(pairs)], ids[len(pairs) :], strict=True):
        tokens = np.array([*start, *prompt, *completion, tokenizer.eos_token_id], dtype=np.uint32)
        encoded.append(Encoded(tokens, np.arange(len(tokens)) >= len(start) + len(prompt)))
    return encoded


def encode_prompts(tokenizer: Any, examples: Sequence[Example]) -> list[list[int]]:
    """Tokenize prompts as training data is tokenized; conversations end with the generation prompt.

    `examples` are prompts without completion, and conversations; at least one.

    Raises:
        UserError: There is no chat template.
        InvalidRecordError: The template rejects the messages, or a prompt is empty.
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
    """Return the token that ends an assistant turn; None if no special token does."""
    chat = Conversation("", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    try:
        turn = render_prompt(tokenizer, chat, for_generation=False)
    except UserError:  # raised again when messages are rendered
        return None
    ids = tokenizer(turn[: end_of_turn(turn, special_tokens(tokenizer))], add_special_tokens=False)["input_ids"]
    return ids[-1] if ids and ids[-1] in tokenizer.get_added_vocab().values() else None


def start_tokens(tokenizer: Any) -> list[int]:
    """Return [bos] for tokenizers that begin every sequence with it (Llama's), else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _encode_chats(tokenizer: Any, chats: list[Conversation]) -> list[Encoded]:
    """Tokenize conversations as a whole, and find the assistant's tokens by their character offsets."""
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

    This includes tokens across the border of a span: some tokenizers join the blank before the first word to it, others
    the line break to the end-of-turn token, and both tokens must be trained.
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
    """Render a conversation with the chat template, and find the assistant's turns. Errors are those of `encode`.

    Returns the text, and the character range (begin, end) of each assistant turn, including its end token, which is one
    of the tokenizer's `special` tokens.

    A turn is the text that the template adds for one more message, without the generation prompt. This works for every
    template whose output only grows with the messages, with or without `{% generation %}`. An empty turn has no loss.
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
    """Render messages with the chat template, for the assistant to continue. Errors are those of `encode`.

    `for_generation` appends the generation prompt, the beginning of an assistant turn.
    """
    return _render(tokenizer, chat, [len(chat.messages)], for_generation=for_generation)[0]


def _render(tokenizer: Any, chat: Conversation, counts: Sequence[int], *, for_generation: bool) -> list[str]:
    """Render the first `count` messages for each count. Any exception of the template becomes an InvalidRecordError.

    One call for all counts: each call converts tools and special tokens again, which takes as long as rendering.
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
    """Return the special tokens. Cache the result: the tokenizer builds a dictionary in each call."""
    return tuple(tokenizer.get_added_vocab())


def end_of_turn(turn: str, special: tuple[str, ...]) -> int:
    """Return the length of a turn with its end token, but without the line break that templates append."""
    stripped = turn.rstrip()
    return len(stripped) if special and stripped.endswith(special) else len(turn)
