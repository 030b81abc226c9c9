"""Prompts: from text or JSONL to tokens, and from tokens back to text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from odc_mpi.data.encode import encode_prompts, end_of_turn_token
from odc_mpi.data.examples import Conversation, Example, PromptCompletion
from odc_mpi.data.prompt_dataset import read_prompts
from odc_mpi.errors import UserError
from odc_mpi.generation.generate import CompletionOutput
from odc_mpi.models.decoding import Prompt


class Request(NamedTuple):
    """A prompt as its author wrote it, and as tokens.

    Attributes:
        example: A pair without a completion, or a conversation.
        prompt: The tokens.
    """

    example: Example
    prompt: Prompt


def read_examples(text: str | None, path: Path | None) -> list[Example]:
    """Return the one prompt of the command line, or those of a file.

    Raises:
        UserError: Neither or both are given, the file cannot be read, or has no prompt or a line that is none.
    """
    if (text is None) == (path is None):
        got = "neither" if text is None else "both"
        raise UserError(f"expected one of --prompt TEXT and --prompts FILE, got {got}")
    if text is not None:
        if not text:
            raise UserError("--prompt: expected a text, got an empty one")
        return [PromptCompletion("--prompt", text, "")]
    assert path is not None
    return [example for block in read_prompts(path, "--prompts") for example, _ in block]


def tokenize(tokenizer: Any, examples: Sequence[Example], stop: Sequence[int]) -> list[Request]:
    """Tokenise prompts as training data, messages through the chat template up to the assistant's turn.

    Args:
        tokenizer: A fast tokenizer of transformers.
        examples: The prompts.
        stop: Tokens that end any completion; those of messages also end with the assistant's turn.

    Raises:
        UserError: There is no chat template, or it refuses the messages; the message names the line.
    """
    turn = end_of_turn_token(tokenizer) if any(isinstance(example, Conversation) for example in examples) else None
    ends = stop if turn is None else (*stop, turn)
    requests = []
    for index, (example, tokens) in enumerate(zip(examples, encode_prompts(tokenizer, examples), strict=True)):
        stop_tokens = ends if isinstance(example, Conversation) else stop
        requests.append(Request(example, Prompt(index, tokens, tuple(dict.fromkeys(stop_tokens)))))
    return requests


def output_record(tokenizer: Any, request: Request, completion: CompletionOutput) -> dict[str, Any]:
    """Return the content of a line of the output file: the prompt, and the text without its stop token."""
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    example = request.example
    prompt = {"messages": example.messages} if isinstance(example, Conversation) else {"prompt": example.prompt}
    count = {"num_tokens": len(completion.tokens), "finish_reason": completion.finish_reason}
    return {**prompt, "completion": text, **count}
