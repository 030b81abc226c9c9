"""Prompts of `odc-mpi generate`: reading, tokenizing, and records of completions for the output file."""

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
    """A prompt as text, a `PromptCompletion` with an empty completion or a `Conversation`, and as tokens."""

    example: Example
    prompt: Prompt


def read_examples(text: str | None, questions: Sequence[str] | None, path: Path | None) -> list[Example]:
    """Return the prompt `text` or the `questions`, each as a conversation, or read the prompts in the file `path`.

    Raises `UserError` if not exactly one argument is given, a text is empty, or the file cannot be read, has no prompts
    or an invalid line.
    """
    options = {"--prompt TEXT": text, "--chat TEXT": questions, "--prompts FILE": path}
    given = [option for option, value in options.items() if value is not None]
    if len(given) != 1:
        raise UserError(f"expected one of {', '.join(options)}, got {' and '.join(given) or 'none'}")
    if path is not None:
        return [example for block in read_prompts(path, "--prompts") for example, _ in block]
    option, texts = given[0].split()[0], [text] if text is not None else list(questions or ())
    if not all(texts):
        raise UserError(f"{option}: expected a text, got an empty string")
    if text is not None:
        return [PromptCompletion(option, text, "")]
    return [Conversation(option, [{"role": "user", "content": question}]) for question in texts]


def tokenize(tokenizer: Any, examples: Sequence[Example], stop: Sequence[int]) -> list[Request]:
    """Tokenize prompts like training data. Messages are formatted by the chat template, up to the assistant's turn.

    Generation ends at a token in `stop`. For a prompt with messages it also ends at the end-of-turn token. Raises
    `UserError` if a prompt cannot be encoded; see `encode_prompts`.
    """
    turn = end_of_turn_token(tokenizer) if any(isinstance(example, Conversation) for example in examples) else None
    ends = stop if turn is None else (*stop, turn)
    requests = []
    for index, (example, tokens) in enumerate(zip(examples, encode_prompts(tokenizer, examples), strict=True)):
        stop_tokens = ends if isinstance(example, Conversation) else stop
        requests.append(Request(example, Prompt(index, tokens, tuple(dict.fromkeys(stop_tokens)))))
    return requests


def output_record(tokenizer: Any, request: Request, completion: CompletionOutput) -> dict[str, Any]:
    """Return the record of a completion in the output file. The text is decoded without special tokens."""
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    example = request.example
    prompt = {"messages": example.messages} if isinstance(example, Conversation) else {"prompt": example.prompt}
    count = {"num_tokens": len(completion.tokens), "finish_reason": completion.finish_reason}
    return {**prompt, "completion": text, **count}
