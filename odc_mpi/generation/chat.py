"""Conversation with a model in the terminal, in one process."""

import sys

from transformers import TextStreamer

from odc_mpi.data.examples import Conversation
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.generation.generate import generate
from odc_mpi.generation.load import GenerateArguments
from odc_mpi.generation.run import load_on_all_ranks, output_record, resolve_paths, shard, tokenize
from odc_mpi.models.decoding import unsharded_if_fits
from odc_mpi.runtime.world import World

_PROMPT = "> "


def chat(arguments: GenerateArguments, world: World, system: str | None = None) -> None:
    """Read questions from standard input, one per line, and print each answer while it is generated.

    The conversation consists of the `system` message, if given, and all questions and answers so far. If generation
    fails, for example because the conversation is too long, an error is printed and a new conversation begins. Raises
    `AllRanksUserError` if there are several ranks, the model cannot be used, or its tokenizer has no chat template.
    """
    if world.size > 1:
        raise AllRanksUserError(f"chat: expected one process, got {world.size} ranks: start it without mpiexec")
    source = load_on_all_ranks(resolve_paths(arguments, world), world)
    if not source.tokenizer.chat_template:
        raise AllRanksUserError(
            f"{source.name}: expected a tokenizer with a chat template; odc-mpi generate --prompt needs none"
        )
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    model = shard(source, arguments.device, world)
    streamer = TextStreamer(source.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with unsharded_if_fits(model):
        while (question := _read_line()) is not None:
            messages.append({"role": "user", "content": question})
            try:
                [request] = tokenize(source.tokenizer, [Conversation("chat", messages)], source.stop)
                output = generate(model.module, request.prompt, arguments.sampling, streamer)
            except UserError as error:
                print(f"odc-mpi: error: {error}; a new conversation begins", file=sys.stderr, flush=True)
                messages = list(first)
                continue
            answer = output_record(source.tokenizer, request, output)["completion"]
            messages.append({"role": "assistant", "content": answer})
    model.close()


def _read_line() -> str | None:
    """Return the next non-blank line without surrounding whitespace, or None at the end of the input."""
    while True:
        try:
            line = input(_PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            return line
