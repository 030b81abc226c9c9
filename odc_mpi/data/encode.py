"""From examples to tokens and the loss mask.

The tokenizer is an argument, any fast one of Hugging Face: `tokenizer` loads or trains it.
"""

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
    """A tokenised sequence.

    Attributes:
        tokens: uint32 [length].
        loss_mask: bool [length]; True where the token is to be predicted.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as the text that the model sees.

    Attributes:
        text: The whole conversation, through the chat template.
        spans: First and one past the last character of each of the assistant's turns, its end token included.
    """

    text: str
    spans: tuple[CharSpan, ...]


def encode(tokenizer: Any, examples: Sequence[Example]) -> list[Encoded]:
    """Tokenise examples in one batch per shape.

    Args:
        tokenizer: A fast tokenizer of transformers.
        examples: Pairs and conversations, mixed at will.

    Returns:
        One sequence per example, in order.

    Raises:
        UserError: The tokenizer lacks the end-of-sequence token (pairs) or the chat template (conversations), or the
            assistant's turns cannot be found in the template's text.
        BadLine: The template refuses the messages, or its text cannot be tokenised.
    """
    pairs = [example for example in examples if isinstance(example, PromptCompletion)]
    chats = [example for example in examples if isinstance(example, Conversation)]
    encoded_pairs = iter(_encode_pairs(tokenizer, pairs))
    encoded_chats = iter(_encode_chats(tokenizer, chats))
    return [next(encoded_pairs if isinstance(example, PromptCompletion) else encoded_chats) for example in examples]


def _encode_pairs(tokenizer: Any, pairs: list[PromptCompletion]) -> list[Encoded]:
    """Tokenise prompts and completions apart, so that no token straddles the border where the loss begins."""
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
    """Tokenize prompts as training data, messages through the chat template up to the assistant's turn.

    Args:
        tokenizer: A fast tokenizer of transformers.
        examples: Pairs without a completion, and conversations; at least one.

    Returns:
        The tokens of each; at least one.

    Raises:
        UserError: There is no chat template.
        BadLine: The template refuses the messages, or a prompt is empty.
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
    """Return the token that ends the assistant's turns, if there is one of its own."""
    chat = Conversation("", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    try:
        turn = render_prompt(tokenizer, chat, for_generation=False)
    except UserError:  # told when messages are rendered
        return None
    ids = tokenizer(turn[: end_of_turn(turn, _special(tokenizer))], add_special_tokens=False)["input_ids"]
    return ids[-1] if ids and ids[-1] in tokenizer.get_added_vocab().values() else None


def start_tokens(tokenizer: Any) -> list[int]:
    """Return [bos] for tokenizers that begin every sequence with it (Llama's), else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _encode_chats(tokenizer: Any, chats: list[Conversation]) -> list[Encoded]:
    """Tokenise whole conversations and find the assistant's tokens by the characters that they stand for."""
    if not chats:
        return []
    special = _special(tokenizer)
    rendered = [render_chat(tokenizer, chat, special) for chat in chats]
    batch = tokenizer(
        [chat.text for chat in rendered],
        add_special_tokens=False,  # the template writes them
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return [
        Encoded(np.array(ids, dtype=np.uint32), _mask(offsets, chat.spans))
        for ids, offsets, chat in zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
    ]


def _mask(offsets: list[CharSpan], spans: tuple[CharSpan, ...]) -> npt.NDArray[np.bool_]:
    """Mark the tokens that stand for at least one character of a span.

    A token over a span's border counts as inside: some tokenizers glue the blank before the first word to it, others
    the line break to the end-of-turn token, and both tokens have to be learnt.
    """
    # np.array of a list of tuples takes twice as long.
    bounds = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    ends = bounds[:, 1]
    # Byte-level tokenizers that trim blanks off their offsets give a blank alone an empty range at its end.
    begins = np.minimum(bounds[:, 0], ends - 1)
    mask = np.zeros(len(bounds), dtype=np.bool_)
    for start, stop in spans:
        mask |= (begins < stop) & (ends > start)
    return mask


def render_chat(tokenizer: Any, chat: Conversation, special: tuple[str, ...] | None = None) -> RenderedChat:
    """Put a conversation through the chat template and find the assistant's turns in the text.

    A turn is the text that the template adds for one more message, without the generation prompt. This works for any
    template whose output only grows with the messages, with `{% generation %}` in it or without. An empty turn is not
    to be learnt.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        chat: The conversation.
        special: The tokenizer's special tokens, where the caller has them at hand.

    Raises:
        UserError: There is no template, or it rewrites earlier turns.
        BadLine: The template refuses the messages, or its text cannot be tokenised.
    """
    special = _special(tokenizer) if special is None else special
    trained = [i for i in range(len(chat.messages)) if chat.message_has_loss(i)]
    prompts = _render(tokenizer, chat, trained, for_generation=True)
    turns = _render(tokenizer, chat, sorted({*(i + 1 for i in trained), len(chat.messages)}), for_generation=False)
    text, spans = turns[-1], []
    for i, prompt, turn in zip(trained, prompts, turns, strict=False):
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise UserError(
                f"{chat.location}: the chat template rewrites earlier text when message {i + 1} is added, so what the "
                "assistant says cannot be found: change the tokenizer's chat_template"
            )
        spans.append((len(prompt), end_of_turn(turn, special)))
    return RenderedChat(text, tuple(spans))


def render_prompt(tokenizer: Any, chat: Conversation, *, for_generation: bool = True) -> str:
    """Put messages through the chat template, for the assistant to go on.

    Args:
        tokenizer: A tokenizer of transformers.
        chat: The messages.
        for_generation: Whether the text ends with the beginning of the assistant's turn.

    Raises:
        UserError: There is no chat template, or it refuses the messages.
    """
    return _render(tokenizer, chat, [len(chat.messages)], for_generation=for_generation)[0]


def _render(tokenizer: Any, chat: Conversation, counts: Sequence[int], *, for_generation: bool) -> list[str]:
    """Render so many of the first messages; any exception of the template becomes an error about the conversation.

    All counts at once: each call looks at tools and special tokens anew, which takes as long as a template.
    """
    if not counts:
        return []
    if not tokenizer.chat_template:
        raise UserError(
            f"{chat.location}: 'messages' need a chat template, and the tokenizer has none: take another one"
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
            text.encode("utf-8")  # other fields than the content may have half of a surrogate pair
    except Exception as error:
        raise InvalidRecordError(
            f"{chat.location}: the tokenizer's chat template refuses the messages ({one_line_message(error)})"
        ) from error
    return texts


def _special(tokenizer: Any) -> tuple[str, ...]:
    """Return the special tokens; the tokenizer makes a dictionary of them in each call."""
    return tuple(tokenizer.get_added_vocab())


def end_of_turn(turn: str, special: tuple[str, ...]) -> int:
    """Return the end of a turn: after the end token, without the line break that templates add behind it."""
    stripped = turn.rstrip()
    return len(stripped) if special and stripped.endswith(special) else len(turn)
