"""Prompts: from text or JSONL to tokens, and from tokens back to text. Local."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from odc_mpi.data.encode import encode_prompts, end_of_turn_token
from odc_mpi.data.examples import Conversation, Example, Pair
from odc_mpi.data.prompts import read_prompts
from odc_mpi.errors import UserError
from odc_mpi.generation.generate import Completion
from odc_mpi.models.decoding import Prompt


class Request(NamedTuple):
    """A prompt as its author wrote it, and as tokens.

    Attributes:
        asked: A pair without a completion, or a conversation.
        prompt: The tokens.
    """

    asked: Example
    prompt: Prompt


def read(text: str | None, path: Path | None) -> list[Example]:
    """Return the one prompt of the command line, or those of a file. Local.

    Raises:
        UserError: Neither or both are given, the file cannot be read, or has no prompt or a line that is none.
    """
    if (text is None) == (path is None):
        got = "neither" if text is None else "both"
        raise UserError(f"expected one of --prompt TEXT and --prompts FILE, got {got}")
    if text is not None:
        if not text:
            raise UserError("--prompt: expected a text, got an empty one")
        return [Pair("--prompt", text, "")]
    assert path is not None
    return [example for block in read_prompts(path, "--prompts") for example, _ in block]


def tokenized(tokenizer: Any, asked: Sequence[Example], stop: Sequence[int]) -> list[Request]:
    """Tokenise prompts as training data, messages through the chat template up to the assistant's turn. Local.

    Args:
        tokenizer: A fast tokenizer of transformers.
        asked: The prompts.
        stop: Tokens that end any completion; those of messages also end with the assistant's turn.

    Raises:
        UserError: There is no chat template, or it refuses the messages; the message names the line.
    """
    turn = end_of_turn_token(tokenizer) if any(isinstance(one, Conversation) for one in asked) else None
    ends = stop if turn is None else (*stop, turn)
    requests = []
    for index, (one, tokens) in enumerate(zip(asked, encode_prompts(tokenizer, asked), strict=True)):
        own_stop = ends if isinstance(one, Conversation) else stop
        requests.append(Request(one, Prompt(index, tokens, tuple(dict.fromkeys(own_stop)))))
    return requests


def told(tokenizer: Any, request: Request, completion: Completion) -> dict[str, Any]:
    """Return the content of a line of the output file: the prompt, and the text without its stop token. Local."""
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    asked = request.asked
    prompt = {"messages": asked.messages} if isinstance(asked, Conversation) else {"prompt": asked.prompt}
    count = {"num_tokens": len(completion.tokens), "finish_reason": completion.finish_reason}
    return {**prompt, "completion": text, **count}
