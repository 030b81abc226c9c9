"""Generation of completions on all ranks of a job, and conversation with a model in one process.

The phases of `generate_all`:

set up     load the model and the prompts on all ranks, compare them, allocate windows         collective
generate   each rank claims prompts, and decodes them in a batch in which other prompts take
           the place of those that have ended                                                  one-sided
finish     gather the completions; rank 0 writes or prints them                                collective

Random numbers depend only on `SamplingParams.seed` and the number of a prompt. The rounding of logits depends on the
batch, so that a completion may differ where two tokens are almost equally likely; a batch size of 1 excludes that.
"""

import errno
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TextStreamer

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.chat.templates import fix_time
from odc_mpi.data.encoding.encode import encode_prompts, end_of_turn_token
from odc_mpi.data.examples import Conversation, Example, PromptCompletion
from odc_mpi.data.prompt_dataset import read_prompts, warn_ignored
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.files import atomic_write
from odc_mpi.generation.generate import CompletionOutput, completion_output, generate
from odc_mpi.generation.load import GenerateArguments, GenerationModel, load_generation_model
from odc_mpi.hub import resolve_model_path
from odc_mpi.models.decoding import Prompt, max_new_tokens_for, unsharded_if_fits
from odc_mpi.rollout.decode import decode_claimed, prompt_batch
from odc_mpi.rollout.sampling import PromptCompletions
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel


class Request(NamedTuple):
    """Prompt, both as an example (`Conversation`, or `PromptCompletion` with an empty completion) and as tokens."""

    example: Example
    prompt: Prompt


def generate_all(arguments: GenerateArguments, world: World) -> list[CompletionOutput]:
    """Complete all prompts, write or print the completions, and return them in prompt order. Collective.

    Raises:
        AllRanksUserError: The model, a prompt or the output file cannot be used.
        UserError: The device or the MPI library cannot be used.
    """
    world.run_on_all(lambda: _check_out(arguments) if world.rank == 0 else None)
    examples = world.run_on_all(lambda: read_examples(arguments.prompt, arguments.chat, arguments.prompts))
    source = load_on_all_ranks(arguments, world)
    ignored: Counter[str] = Counter()
    requests = world.run_on_all(lambda: _requests(source, examples, ignored))
    if world.rank == 0:
        warn_ignored("--prompts", ignored, len(requests))
    world.require_same("\n".join(json.dumps(request.prompt) for request in requests), "the prompts")
    model = shard(source, arguments.device, world)
    tickets = Tickets(world)
    outputs = _complete(source, model, requests, arguments, tickets, world)
    completions = sorted(itertools.chain.from_iterable(world.gather_objects(outputs)))
    records = [output_record(source.tokenizer, *pair) for pair in zip(requests, completions, strict=True)]
    if (out := arguments.out) is not None:
        world.run_on_all(lambda: _write(out, records) if world.rank == 0 else None)
    elif world.rank == 0 and world.size > 1:
        for completion in completions:
            _print(source.tokenizer, requests, completion)
    tickets.close()
    model.close()
    return completions


def _complete(
    source: GenerationModel,
    model: ShardedModel,
    requests: Sequence[Request],
    arguments: GenerateArguments,
    tickets: Tickets,
    world: World,
) -> list[CompletionOutput]:
    """Complete the prompts that this rank claims, in any order. One-sided. A single rank prints them in order."""
    prints = arguments.out is None and world.size == 1
    if prints and len(requests) == 1:
        with unsharded_if_fits(model):
            streamer = _print_prompt(source.tokenizer, requests[0], 1)
            return [generate(model.module, requests[0].prompt, arguments.sampling, streamer)]
    draw = tickets.draw(len(requests))
    outputs: dict[int, CompletionOutput] = {}
    num_printed = 0

    def on_prompt_done(number: int, found: PromptCompletions) -> None:
        nonlocal num_printed
        outputs[number] = completion_output(number, found)
        while prints and num_printed in outputs:
            _print(source.tokenizer, requests, outputs[num_printed])
            num_printed += 1

    def claim(count: int) -> dict[int, Prompt]:
        return {index: requests[index].prompt for index in itertools.islice(draw, count)}

    max_prompts = min(-(-len(requests) // world.size), arguments.batch_size)
    batch = prompt_batch(model.module, arguments.sampling.rollout, max_prompts, on_prompt_done)
    with unsharded_if_fits(model), model.activity("generating") as set_activity:

        def report(token: int) -> None:
            set_activity(f"generating token {token:,} of {len(batch.prompts):,} completions")

        decode_claimed(batch, claim, 0, report)
    return list(outputs.values())


def load_on_all_ranks(arguments: GenerateArguments, world: World) -> GenerationModel:
    """Load the model `arguments.source` on all ranks, after downloading missing Hub models. Collective."""
    report = partial(print, file=sys.stderr, flush=True) if world.rank == 0 else lambda line: None
    paths: dict[str, Any] = {}
    for field, option in (("source", "SOURCE"), ("tokenizer", "--tokenizer"), ("base", "--base")):
        if (path := getattr(arguments, field)) is not None:
            directory = resolve_model_path(
                str(path),
                option,
                weights=field != "tokenizer",
                gather=world.gather_objects,
                downloads=world.local_rank == 0,
                report=report,
            )
            paths[field] = Path(directory)
    for field, path in paths.items():
        world.require_same(path.name, field)  # for a snapshot in a cache, the name is the commit
    arguments = replace(arguments, **paths)
    source = world.run_on_all(lambda: load_generation_model(arguments, world.rank, world.size))
    world.require_same(Path(source.name).name, "SOURCE")
    fix_time(source.tokenizer, world.gather_objects(datetime.now().isoformat())[0])
    return source


def shard(source: GenerationModel, device: str, world: World) -> ShardedModel:
    """Freeze the parameters of a loaded model, and shard the model across the ranks of `world`. Collective."""
    source.meta_model.module.requires_grad_(False)
    return shard_model(
        source.meta_model.module,
        world,
        weights=source.meta_model.weights,
        comm=decide_for(world, device=device, tickets=True),
        device=device,
    )


def read_examples(text: str | None, questions: Sequence[str] | None, path: Path | None) -> list[Example]:
    """Return the prompt `text`, a conversation for each of the `questions`, or the prompts in the file `path`.

    Raises `UserError` unless exactly one argument is given, or if `text` or a question is empty, or if the file cannot
    be read, contains no prompts or contains an invalid line.
    """
    options = {"--prompt TEXT": text, "--chat TEXT": questions, "--prompts FILE": path}
    used = [option for option, value in options.items() if value is not None]
    if len(used) != 1:
        raise UserError(f"expected one of {', '.join(options)}, got {' and '.join(used) or 'none'}")
    if path is not None:
        return [example for block in read_prompts(path, "--prompts") for example, _ in block]
    option, texts = used[0].split()[0], [text] if text is not None else list(questions or ())
    if not all(texts):
        raise UserError(f"{option}: expected a text, got an empty string")
    if text is not None:
        return [PromptCompletion(option, text, "")]
    return [Conversation(option, [{"role": "user", "content": question}]) for question in texts]


def tokenize(
    tokenizer: Any, examples: Sequence[Example], stop: Sequence[int], ignored: Counter[str] | None = None
) -> list[Request]:
    """Tokenize prompts in the same way as training data.

    Conversations end with the generation prompt of the chat template. The stop tokens of a prompt are `stop`
    and, for a conversation, the end-of-turn token. Counts in `ignored` what the chat template leaves out of prompts.
    Raises `UserError` if a prompt cannot be encoded (see `encode_prompts`).
    """
    turn = end_of_turn_token(tokenizer) if any(isinstance(example, Conversation) for example in examples) else None
    chat_stop = tuple(stop) if turn is None or turn in stop else (*stop, turn)
    prompts = encode_prompts(tokenizer, examples, ignored)
    return [
        Request(example, Prompt(index, tokens, chat_stop if isinstance(example, Conversation) else tuple(stop)))
        for index, (example, tokens) in enumerate(zip(examples, prompts, strict=True))
    ]


def output_record(tokenizer: Any, request: Request, completion: CompletionOutput) -> dict[str, Any]:
    """Return the JSON object to write to the output file for a completion. Special tokens are omitted from its text."""
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    example = request.example
    prompt = {"messages": example.messages} if isinstance(example, Conversation) else {"prompt": example.prompt}
    count = {"num_tokens": len(completion.tokens), "finish_reason": completion.finish_reason}
    return {**prompt, "completion": text, **count}


def _requests(source: GenerationModel, examples: Sequence[Example], ignored: Counter[str]) -> list[Request]:
    requests = tokenize(source.tokenizer, examples, source.stop, ignored)
    for request in requests:
        try:
            max_new_tokens_for(source.meta_model.module, request.prompt)
        except UserError as error:
            raise UserError(f"{request.example.location}: {error}") from error
    return requests


def _check_out(arguments: GenerateArguments) -> None:
    """Raise `UserError` before completions are generated if the output file cannot be written or is an input."""
    if (out := arguments.out) is None:
        return
    for path in (arguments.prompts, arguments.source, arguments.tokenizer, arguments.base):
        if path and out.exists() and path.exists() and (out.samefile(path) or path.resolve() in out.resolve().parents):
            raise UserError(f"--out: expected a new file, or one that is not an input, got {out}: change --out")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _write_error(out, error) from error


def _write_error(out: Path, error: OSError) -> UserError:
    return UserError(f"--out: cannot write {out}: {error.strerror}")


def _write(out: Path, records: list[dict[str, Any]]) -> None:
    try:
        with atomic_write(out) as new:
            new.write_text("".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in records), encoding="utf-8")
    except OSError as error:
        raise _write_error(out, error) from error
    print(f"wrote {len(records):,} completions to {out}", flush=True)


def _print(tokenizer: Any, requests: Sequence[Request], completion: CompletionOutput) -> None:
    request = requests[completion.number]
    _print_prompt(tokenizer, request, len(requests))
    print(output_record(tokenizer, request, completion)["completion"], flush=True)


def _print_prompt(tokenizer: Any, request: Request, count: int) -> TextStreamer:
    """Print a prompt, and return a streamer that prints its completion."""
    if count > 1:
        print(f"[{request.prompt.number + 1} of {count}]", flush=True)
    if isinstance(request.example, PromptCompletion):
        print(request.example.prompt, end="", flush=True)
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def chat(arguments: GenerateArguments, world: World, system: str | None = None) -> None:
    """Read questions from standard input, one per line, and print each answer as it is generated.

    The conversation consists of the `system` message, if given, and all questions and answers so far. If generation
    fails, for example because the conversation is too long, an error is printed and a new conversation begins. Raises
    `AllRanksUserError` if there are several ranks, the model cannot be used, or its tokenizer has no chat template, and
    `UserError` if the device or the MPI library cannot be used.
    """
    if world.size > 1:
        raise AllRanksUserError(f"chat: expected one process, got {world.size} ranks: start it without mpiexec")
    source = load_on_all_ranks(arguments, world)
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
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            return line
