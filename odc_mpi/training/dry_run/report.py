"""Report of a dry run: memory per rank, steps and tokens, and the first microbatch as text."""

import itertools

from rich.console import Console

from odc_mpi.comm.islands.islands import ranks_per_island
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.data.show import show_sequences
from odc_mpi.errors import UserError
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.runtime.world import World
from odc_mpi.training.dry_run.memory import MemoryPart, estimate_memory
from odc_mpi.training.exact import apply_exact_settings
from odc_mpi.training.inputs import Inputs, open_inputs
from odc_mpi.training.resolved_settings import resolve_settings
from odc_mpi.training.run import resolve_steps
from odc_mpi.training.run_info import samples_per_step, steps_per_epoch, unit_of_samples
from odc_mpi.training.settings import Config

#: Number of minibatches whose plans are searched for the largest microbatch.
_NUM_MINIBATCHES = 50


def dry_run(config: Config, world: World, num_ranks: int | None = None) -> None:
    """Print the memory per rank, the number of steps and, except for GRPO, the first microbatch of a run. Collective.

    The report is for `num_ranks` ranks on one node or, by default, for the ranks and nodes of this job. No file is
    written, except for downloaded models. Raises `AllRanksUserError` if the settings, data or model cannot be used.
    """
    config = resolve_settings(config, world)[0]
    size, local_size = (num_ranks, num_ranks) if num_ranks else (world.size, world.local_size)

    def describe() -> None:
        num_islands = 1
        if config.islands.mode == "outer":
            nodes = {str(first): min(local_size, size - first) for first in range(0, size, local_size)}
            num_islands = size // ranks_per_island(config.islands.by, nodes)
        inputs = open_inputs(apply_exact_settings(config), 0, size, num_islands)
        base_bytes = peak_resident_bytes()
        full = resolve_steps(config, inputs.dataset)
        sequences, microbatch, accumulates = _inspect_plans(inputs, full)
        parts = estimate_memory(full, inputs.model, size, local_size, sequences, accumulates=accumulates)
        parts.insert(0, MemoryPart("Python and its libraries", base_bytes))
        print("\n".join([*_describe_size(full, inputs, size), *_table(parts)]))
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
    num, per_step, steps = len(inputs.dataset), samples_per_step(config), config.run.steps
    epochs = steps / steps_per_epoch(config, num)
    num_parameters = sum(parameter.numel() for parameter in inputs.model.module.parameters())
    lines = [
        f"ranks   {num_ranks}",
        f"model   {type(inputs.model.module).__name__}, {num_parameters:,} parameters, {config.model.param_dtype}",
        f"data    {config.data.path}: {num:,} {unit_of_samples(config)}, {per_step} per step",
        f"steps   {steps:,}, {epochs:.2f} epochs",
    ]
    if isinstance(inputs.dataset, Dataset):
        mean, trained = inputs.dataset.lengths.mean(), inputs.dataset.num_trained_tokens.mean()
        lines.append(f"tokens  about {epochs * num * mean:,.0f}, of which {epochs * num * trained:,.0f} with loss")
    return [*lines, f"output  {config.run.dir} (not written)"]


def _table(parts: list[MemoryPart]) -> list[str]:
    rows = [(part.name, part.num_bytes, part.on_gpu) for part in parts]
    rows += [("total", sum(x.num_bytes for x in parts if x.on_gpu is gpu), gpu) for gpu in (False, True)]
    return [
        "memory per rank (estimate)",
        *(
            f"  {name:26}{num_bytes / 2**20:12,.0f} MiB{'  GPU' if on_gpu else ''}"
            for name, num_bytes, on_gpu in rows
            if num_bytes
        ),
    ]
