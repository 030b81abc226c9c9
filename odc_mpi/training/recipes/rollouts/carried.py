"""Memory for completions in progress, whose keys and values are kept between steps with `rl.max_staleness`."""

from typing import Any

from odc_mpi.api import free_bytes
from odc_mpi.comm.device.device import find_device
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.formatting import format_quantity
from odc_mpi.models.decoding import CachedForward
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.recipes.rollouts.settings import RLConfig


def require_carried(world: World, model: ShardedModel, rl: RLConfig, prompt_length: int, num_prompts: int) -> int:
    """Return the bytes per rank that keys and values of completions in progress can take between steps. Collective.

    `prompt_length` is the length in tokens of the longest prompt, and `num_prompts` the number of prompts in a step.
    Raises `AllRanksUserError` if the model cannot carry completions over, or if a rank has too little memory for them.
    """
    module: Any = model.module
    if not decodes_batches(module):
        raise AllRanksUserError(
            f"rl.max_staleness: expected 0 with a model of the family {module.config.model_type}, which decodes one "
            f"prompt at a time, got {rl.max_staleness}: remove rl.max_staleness"
        )
    num_rows = min(rl.max_concurrent_sequences, (rl.max_staleness + 1) * num_prompts * rl.num_generations)
    num_bytes = num_rows * CachedForward(module).cache_bytes(prompt_length + rl.max_completion_length)
    free, num_ranks = free_bytes(world, find_device(model.device.type, world.host_rank))
    share = free // num_ranks

    def check() -> None:
        if num_bytes > share:
            needed, found = (format_quantity("bytes", count) for count in (num_bytes, share))
            raise UserError(
                f"rl.max_staleness: completions in progress may need up to {needed} for keys and values, more than the "
                f"{found} that are free on rank {world.rank}: lower rl.max_concurrent_sequences or "
                "rl.max_completion_length, or set rl.max_staleness to 0"
            )

    world.run_on_all(check)
    return num_bytes
