"""Generation on all ranks of a job.

set up     collective: all ranks agree on model and prompts, and allocate windows
generate   one-sided: each rank draws the next prompt when it is done with one, and waits for nobody
finish     collective: rank 0 gets the completions of all, and writes them
"""

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.examples import Example, Pair
from odc_mpi.errors import UserError
from odc_mpi.files import replacing
from odc_mpi.generation.generate import Completion, Generate, Sampling, generate, room_for
from odc_mpi.generation.prompts import Request, read, tokenized, told
from odc_mpi.generation.source import Source, open_source
from odc_mpi.models.decoding import on_this_rank
from odc_mpi.runtime.world import World


@dataclass(frozen=True)
class Job:
    """What is to be generated.

    Attributes:
        source: See `open_source`, as `step` and `tokenizer`.
        step: Of a run.
        tokenizer: Place of a tokenizer, or None.
        prompt: The only prompt, or None.
        prompts: File of prompts, or None.
        sampling: How tokens are chosen.
        out: JSONL file to write; None: the text goes to the terminal.
        device: cpu or cuda.
        attn_implementation: See `open_source`, as `base`.
    """

    source: Path
    step: str | None
    tokenizer: Path | None
    prompt: str | None
    prompts: Path | None
    sampling: Sampling
    out: Path | None
    device: str
    attn_implementation: str | None = None
    base: Path | None = None


def generate_all(job: Job, world: World, engine: Generate = generate) -> list[Completion]:
    """Generate, and write or show the completions. Collective.

    Returns:
        The completions of all prompts in their order, on every rank.

    Raises:
        AgreedError: SOURCE, a prompt or the output cannot be used; raised on every rank.
    """
    world.agree(lambda: _check_out(job.out) if world.rank == 0 else None)
    asked = world.agree(lambda: read(job.prompt, job.prompts))
    source = world.agree(lambda: _open(job, world))
    world.require_same(source.name, "SOURCE")
    requests = world.agree(lambda: _requests(source, asked))
    world.require_same(json.dumps([request.prompt for request in requests]), "the prompts")
    module = source.built.module
    module.requires_grad_(False)
    model = shard_model(
        module,
        world,
        param_dtype=source.dtype,
        weights=source.built.weights,
        decision=decide_for(world, device=job.device, tickets=True),
        device=job.device,
    )
    tickets = Tickets(world)
    shown = _Terminal(source.tokenizer) if job.out is None else None
    # One voice: where several ranks generate, texts appear whole, in their order, at the end.
    at_once = shown is not None and (world.size == 1 or len(requests) == 1)
    own = []
    with on_this_rank(model), model.doing("generating") as note:
        for index in tickets.draw(len(requests)):
            note(f"generating from prompt {index + 1:,} of {len(requests):,}")
            streamer = shown.begin(requests[index], len(requests)) if shown and at_once else None
            own.append(engine(model.module, requests[index].prompt, job.sampling, streamer))
    completions = sorted(one for of_rank in world.gather_objects(own) for one in of_rank)
    if job.out is not None:
        out = job.out
        world.agree(lambda: _write(out, source, requests, completions) if world.rank == 0 else None)
    elif shown and world.rank == 0 and not at_once:
        for request, completion in zip(requests, completions, strict=True):
            shown.show(request, completion, len(requests))
    tickets.close()
    model.close()
    return completions


def _open(job: Job, world: World) -> Source:
    return open_source(job.source, job.step, job.tokenizer, world.rank, world.size, job.attn_implementation, job.base)


def _requests(source: Source, asked: Sequence[Example]) -> list[Request]:
    requests = tokenized(source.tokenizer, asked, source.stop)
    for request in requests:
        try:
            room_for(source.built.module, request.prompt)
        except UserError as error:
            raise UserError(f"{request.asked.where}: {error}") from error
    return requests


def _check_out(out: Path | None) -> None:
    """Refuse a place where no file can be, before anything is generated. Local."""
    if out is None:
        return
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"--out: expected a file that can be written, got {out}: {error.strerror}")


def _write(out: Path, source: Source, requests: list[Request], completions: list[Completion]) -> None:
    pairs = zip(requests, completions, strict=True)
    lines = [json.dumps(told(source.tokenizer, *pair), ensure_ascii=False) for pair in pairs]
    try:
        with replacing(out) as new:
            new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, error) from error
    print(f"{out}: {len(lines):,} completions", flush=True)


class _Terminal:
    """Shows prompts and completions. Local."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begin(self, request: Request, count: int) -> TextStreamer:
        """Show a prompt, and return what shows its completion as it comes."""
        if count > 1:
            print(f"[{request.prompt.number + 1} of {count}]", flush=True)
        if isinstance(request.asked, Pair):
            print(request.asked.prompt, end="", flush=True)
        return TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def show(self, request: Request, completion: Completion, count: int) -> None:
        """Show a prompt and its completion."""
        self.begin(request, count)
        print(told(self._tokenizer, request, completion)["completion"], flush=True)
