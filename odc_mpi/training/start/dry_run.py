"""`odc-mpi train --dry-run`: reports the memory per rank, steps, tokens and the first microbatch, without training.

No parameters are allocated, so the model need not fit in memory.
"""

import itertools

from rich.console import Console

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader, Part
from odc_mpi.data.show import show_sequences
from odc_mpi.errors import UserError
from odc_mpi.models.quantization.linear import hidden_numel
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.runtime.world import World
from odc_mpi.training.exact import apply_exact_settings
from odc_mpi.training.inputs import Inputs, open_inputs
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.rundir.prefix_cache import describe_prefix
from odc_mpi.training.rundir.resume import resolve_steps
from odc_mpi.training.settings import Config
from odc_mpi.training.start.memory_estimate import (
    MemoryPart,
    estimate_memory,
    frozen_bytes,
    holds_frozen_on_node,
    ranks_per_island_of,
)
from odc_mpi.training.start.resolved_settings import resolve_settings
from odc_mpi.training.start.run_info import describe_frozen

#: Number of minibatches whose plans are searched for the largest microbatch.
_NUM_MINIBATCHES = 50


def dry_run(config: Config, world: World, num_ranks: int | None = None) -> None:
    """Print the memory per rank, the number of steps and, except for GRPO, the first microbatch of a run. Collective.

    The report is for `num_ranks` ranks on one node or, by default, for the ranks and nodes of this job. No files are
    written except downloaded models. Raises `AllRanksUserError` if the settings, data or model cannot be used.
    """
    config = resolve_settings(config, world)[0]
    config = world.run_on_all(lambda: apply_exact_settings(config))
    size, local_size = (num_ranks, num_ranks) if num_ranks else (world.size, world.local_size)

    def describe() -> None:
        island_size = ranks_per_island_of(config, size, local_size) if config.islands.train_apart else size
        inputs = open_inputs(config, 0, island_size, Part(0, size // island_size))
        base_bytes = peak_resident_bytes()
        full = resolve_steps(config, inputs)
        prefix_lines = [f"prefix  {describe_prefix(full, inputs)}"] if inputs.prefix else []
        size_lines = _describe_size(full, inputs, size)  # before plans are inspected, which advances the loader
        sequences, microbatch, accumulates = _inspect_plans(inputs, full)
        parts = estimate_memory(full, inputs.model, size, local_size, sequences, accumulates=accumulates)
        parts.insert(0, MemoryPart("Python and its libraries", base_bytes))
        print("\n".join([*size_lines, *prefix_lines, *_table(parts)]))
        if size > local_size and full.run.device == "cpu" and (num_bytes := frozen_bytes(inputs.model)):
            on_node = holds_frozen_on_node(full, inputs.model, size, local_size)
            print(f"frozen parameters: {describe_frozen(num_bytes, size, local_size, on_node=on_node)}")
        print(f"activations and logits of a microbatch of {sum(sequences):,} tokens, the largest of the first steps")
        if isinstance(inputs.dataset, Dataset):
            try:
                show_sequences(inputs.dataset.path, microbatch, Console())
            except UserError as error:
                print(f"first microbatch: not decoded: {error}")
        inputs.close()

    world.run_on_all(lambda: describe() if world.rank == 0 else None)


def _inspect_plans(inputs: Inputs, config: Config) -> tuple[list[int], list[int], bool]:
    """Return the largest microbatch's lengths, the first one's indices, and True if a rank may run several per step."""
    limit = config.data.max_tokens_per_microbatch
    if not (isinstance(inputs.loader, Loader) and isinstance(inputs.dataset, Dataset)):
        return [limit], [], True  # completions are assumed to have the maximum length
    first: list[int] = []
    lengths, largest, accumulates = inputs.dataset.lengths, [0], False
    for minibatch in itertools.islice(inputs.loader, min(_NUM_MINIBATCHES, config.run.steps)):
        plan = minibatch.plan
        accumulates = (
            accumulates or bool(plan.pool) or any(len(list(filter(None, each))) > 1 for each in plan.microbatches)
        )
        for positions in itertools.chain(*plan.microbatches, plan.pool):
            indices = minibatch.indices[list(positions)]
            first = first or indices.tolist()
            largest = max(largest, lengths[indices].tolist(), key=sum)
    return largest, first, accumulates


def _describe_size(config: Config, inputs: Inputs, num_ranks: int) -> list[str]:
    num, steps = len(inputs.dataset), config.run.steps
    epochs = inputs.loader.num_epochs(steps)
    module = inputs.model.module
    num_parameters = sum(parameter.numel() for parameter in module.parameters()) + hidden_numel(module)
    lines = [
        f"ranks   {num_ranks}",
        f"model   {type(inputs.model.module).__name__}, {num_parameters:,} parameters, {config.model.param_dtype}",
        f"data    {config.data.path}: {num:,} {recipe_of(config).describe_samples(config)}",
        f"steps   {steps:,}, {epochs:.2f} epochs",
    ]
    if isinstance(inputs.dataset, Dataset):
        mean, trained = inputs.dataset.lengths.mean(), inputs.dataset.num_trained_tokens.mean()
        lines.append(f"tokens  about {epochs * num * mean:,.0f}, of which {epochs * num * trained:,.0f} with loss")
    return [*lines, f"output  {config.run.dir} (not written)"]


def _table(parts: list[MemoryPart]) -> list[str]:
    totals = [MemoryPart("total", sum(x.num_bytes for x in parts if x.on_gpu is gpu), gpu) for gpu in (False, True)]
    return [
        "memory per rank (estimate)",
        *(
            f"  {part.name:26}{part.num_bytes / 2**20:12,.0f} MiB{'  GPU' if part.on_gpu else ''}"
            for part in (*parts, *totals)
            if part.num_bytes
        ),
    ]
