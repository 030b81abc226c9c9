"""Where log-probabilities of sampling and of training differ: the same tokens, decoded with a cache and in one row.

    OMP_NUM_THREADS=1 python benchmarks/logp_rounding.py MODEL PROMPTS.h5 [--prompts 16] [--completions 16]

Draws completions with `odc_mpi.rollout.sample`. Then computes the log-probabilities of their tokens as sampling does
(a token after the other, a cache, padding on the left), as training does (all sequences in one row, packed), and both
with parts in float64, but for norms, which transformers rounds to float32. Prints a table of differences between two
ways: the most and the mean over all tokens, and the most of the log-probability where that is beyond 1. Local.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from odc_mpi.data.prompts.file import Prompts
from odc_mpi.models import attention
from odc_mpi.rollout.groups import RolloutBatch, RolloutGroup, batches
from odc_mpi.rollout.sample import Completions, GroupSampling, sample
from odc_mpi.train.rl.prompts import PromptText

Ways = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Print the table. Local."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="of transformers, with its tokenizer")
    parser.add_argument("data", type=Path, help="prompts of odc-mpi prepare --prompts-only")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=14)
    arguments = parser.parse_args()
    attention.register()
    packed = attention.IMPLEMENTATIONS["sdpa"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, attn_implementation=packed, dtype=torch.float32
    ).eval()
    groups = _groups(model, arguments.data, arguments.prompts, arguments.completions, arguments.max_length)
    batch = next(batches(groups, 1 << 30, with_all=True))
    single, double = torch.float32, torch.float64
    hidden = {name: (_decoded(own, groups), _in_a_row(own, batch)) for name, own in _models(model).items()}
    weight = model.get_output_embeddings().weight.detach()

    def ways(layers: str, head: torch.dtype, softmax: torch.dtype) -> Ways:
        return tuple(_logps(each, weight, batch.targets, head, softmax) for each in hidden[layers])  # type: ignore

    decoded, trained = ways("float64", double, double)
    exact = trained
    print(f"{len(exact):,} tokens, log-probabilities from {exact.min():.1f} to {exact.max():.2g}")
    print("| | most | mean | most, relative |\n|---|---|---|---|")
    as_run = ways("float32", single, single)
    _row("sampling and training, as run", *as_run, exact)
    _row("the same, log-softmax in float64", *ways("float32", single, double), exact)
    _row("the same, head and log-softmax in float64", *ways("float32", double, double), exact)
    _row("the same, all in float64", decoded, trained, exact)
    _row("sampling, and all in float64", as_run[0], exact, exact)
    _row("training, and all in float64", as_run[1], exact, exact)
    alone = _logps(_decoded(model, groups, together=1), weight, batch.targets, single, single)
    _row("sampling, all together and each completion alone", as_run[0], alone, exact)
    _row("sampling and training, layers in bfloat16", *ways("bfloat16", torch.bfloat16, single), exact)


def _models(model: Any) -> dict[str, Any]:
    return {
        "float32": model,
        "float64": copy.deepcopy(model).double(),
        "bfloat16": copy.deepcopy(model).to(torch.bfloat16),
    }


def _groups(model: Any, data: Path, num_prompts: int, num_completions: int, max_length: int) -> list[RolloutGroup]:
    made: dict[int, Completions] = {}
    with Prompts(data) as prompts:
        text = PromptText(prompts)
        asked = [text.tokens(i, prompts[i]) for i in range(num_prompts)]
    sample(model, asked, GroupSampling(num_completions, max_length), made.__setitem__)
    ones, none = np.ones(num_completions), np.zeros(num_completions, dtype=np.bool_)
    return [
        RolloutGroup(i, i, list(asked[i].tokens), made[i].tokens, made[i].logps, ones, none) for i in range(num_prompts)
    ]


@torch.no_grad()
def _in_a_row(model: Any, batch: RolloutBatch) -> torch.Tensor:
    """Return the last hidden states at the tokens, [tokens, hidden_size], computed as training does."""
    model.set_attn_implementation(attention.IMPLEMENTATIONS["sdpa"])
    states: torch.Tensor = model.base_model(**batch.inputs).last_hidden_state[0, batch.places]
    return states


@torch.no_grad()
def _decoded(model: Any, groups: list[RolloutGroup], together: int = 1 << 30) -> torch.Tensor:
    """Return the same as decoding has them: a token after the other, so many completions at once."""
    model.set_attn_implementation("sdpa")
    sequences = [(group.prompt, completion) for group in groups for completion in group.completions]
    found = []
    for begin in range(0, len(sequences), together):
        part = sequences[begin : begin + together]
        start, length = max(len(prompt) for prompt, _ in part), max(len(own) for _, own in part)
        tokens = torch.zeros(len(part), start + length, dtype=torch.int64)
        mask = torch.ones_like(tokens)
        for row, (prompt, own) in enumerate(part):
            tokens[row, start - len(prompt) : start + len(own)] = torch.tensor([*prompt, *own])
            mask[row, : start - len(prompt)] = 0
        states = _states(model.base_model, tokens, mask, start)
        found += [states[row, : len(own)] for row, (_, own) in enumerate(part)]
    return torch.cat(found)


def _states(layers: Callable[..., Any], tokens: torch.Tensor, mask: torch.Tensor, start: int) -> torch.Tensor:
    """Return the states that predict the tokens from `start` on, [rows, tokens, hidden_size]."""
    cache = transformers.DynamicCache()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found, begin = [], 0
    for end in range(start, tokens.shape[1]):
        new = slice(begin, end)
        given = {"input_ids": tokens[:, new], "attention_mask": mask[:, :end], "position_ids": places[:, new]}
        found.append(layers(**given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1])
        begin = end
    return torch.stack(found, 1)


def _logps(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: torch.dtype, softmax: torch.dtype
) -> torch.Tensor:
    logits = (hidden.to(head) @ weight.to(head).T).to(softmax)
    return (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).double()


def _row(name: str, one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> None:
    apart = (one - other).abs()
    relative = (apart / exact.abs().clamp(min=1.0)).max()
    print(f"| {name} | {apart.max():.1e} | {apart.mean():.1e} | {relative:.1e} |", flush=True)


if __name__ == "__main__":
    main()
