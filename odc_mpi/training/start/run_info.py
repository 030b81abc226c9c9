"""Descriptions of a run: lines to print at start-up, and fields of summary.json about ranks, transport and model."""

from typing import Any, cast

from odc_mpi.comm.context_parallel.kv_windows import KVSizes
from odc_mpi.formatting import truncate_text
from odc_mpi.probe.decision import Decision
from odc_mpi.runtime.job_info import describe_layout, slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.rundir.resume import start_line
from odc_mpi.training.settings import Config, default_learning_rate


def samples_per_step(config: Config) -> int:
    """Return the number of samples per step on all ranks together: sequences, pairs or, with GRPO, prompts."""
    sequences = config.data.minibatch_sequences
    return sequences // config.rl.num_generations if config.run.objective == "grpo" else sequences


def unit_of_samples(config: Config) -> str:
    """Return the plural noun for the samples in the data set, such as "pairs"."""
    return {"grpo": "prompts", "dpo": "pairs", "reward": "pairs"}.get(config.run.objective, "sequences")


def startup_lines(context: RunContext, model: ShardedModel) -> str:
    """Return the text to print before the first step."""
    config, world, inputs, notes = context.config, context.world, context.inputs, context.notes
    decision, resume_point = context.decision, context.resume_point
    data, packing = config.data, inputs.model.packing
    dtype = f"{config.model.param_dtype}{notes.get('model.param_dtype', '')}"
    per_step = f"{unit_of_samples(config)}, {samples_per_step(config)} per step"
    if config.run.objective == "grpo":
        per_step += f" with {config.rl.num_generations} completions each"
    num_steps = "1 step" if config.run.steps == 1 else f"{config.run.steps:,} steps"
    num_epochs = inputs.loader.num_epochs(config.run.steps - (resume_point.step if resume_point else 0))
    num_trainable, num_parameters = numel(model, True), numel(model)
    trainable = f"{num_parameters:,} parameters"
    if num_trainable < num_parameters:
        share = num_trainable / num_parameters
        trainable = f"{num_trainable:,} of {num_parameters:,} parameters trainable ({share:.1%})"
    if config.lora.r is not None:
        trainable += f", LoRA r={config.lora.r}"
    # Printed in advance: if a rank is killed, the launcher ends the others before they can print anything.
    every = config.run.checkpoint_every
    saved = f"saved every {every} steps, from where the same command resumes" if every else "saved after the last step"
    lines = {
        "ranks": f"{world.size} {describe_layout(world.layout, slurm_job())}; {world.mpi_library}",
        **_islands_line(context),
        "model": f"{type(model.module).__name__}, {trainable}, {dtype}, {model.device}{notes.get('run.device', '')}",
        **({"weights": notes["model.path"]} if "model.path" in notes else {}),
        "data": f"{data.path}: {len(inputs.dataset):,} {per_step}, {num_steps} ({num_epochs:.3g} epochs)",
        **({} if packing.packs else {"packing": f"off, one sequence per microbatch: {packing.unpacked_reason}"}),
        **({"attn": "eager, because the scores have soft caps"} if packing.soft_caps else {}),
        **({"cp": _describe_context_parallel(inputs.context_parallel)} if inputs.context_parallel else {}),
        "optim": f"{config.optim.optimizer}, learning rate {config.optim.learning_rate:g}{notes.get('optim.lr', '')}, "
        f"{config.optim.lr_scheduler_type}",
        "comm": _describe_comm(world, model, decision),
        "caches": _describe_caches(config, model),
        "output": f"{config.run.dir}, {saved}",
    }
    if config.lora.r is not None and config.lora.target_modules == "all-linear":
        from odc_mpi.models.adapters import left_out  # imported late, as in `inputs`

        if names := left_out(inputs.model.module):
            lines["lora"] = f"all-linear left out: {', '.join(names)} (set lora.target_parameters)"
    usual = default_learning_rate(config)
    if config.model.path is not None and cast(float, config.optim.learning_rate) > 10 * usual:
        lines["WARNING"] = f"optim.learning_rate is more than 10 times {usual:g}, the default of this objective"
    start = start_line(config, resume_point)
    if resume_point and "islands" in resume_point.metadata and not resume_point.continues_island(context.part):
        start += "; begins with the merged parameters, and the optimizer state of one island"
    return "\n".join([*(f"{name:<8}{text}" for name, text in lines.items()), *filter(None, [start])])


def _islands_line(context: RunContext) -> dict[str, str]:
    if "islands" in context.notes:
        return {"islands": context.notes["islands"]}
    if context.config.islands.by == "off":
        return {}
    if context.islands is None:
        return {"islands": "1, so the parameters are sharded over all ranks"}
    return {"islands": describe_islands(context.islands.size, context.islands.island.size)}


def describe_islands(num_islands: int, num_ranks: int) -> str:
    """Return a description of islands of `num_ranks` consecutive ranks each."""
    ranks = ", ".join(
        f"{first}-{first + num_ranks - 1}" if num_ranks > 1 else str(first)
        for first in range(0, num_islands * num_ranks, num_ranks)
    )
    return f"{num_islands}, each with all parameters: ranks {truncate_text(ranks, 60)}"


def _describe_context_parallel(sizes: KVSizes | str) -> str:
    if isinstance(sizes, str):
        return f"off: {sizes}"
    memory = f"{sizes.num_bytes / 2**20:,.1f} MiB per rank for keys and values"
    return f"on for sequences too long for an even share of the work; {memory}"


def _describe_comm(world: World, model: ShardedModel, decision: Decision) -> str:
    if world.size == 1 and decision.window_device is None:
        return "single rank, no communication"
    text = decision.one_line()
    if decision.reduction.value == "mailbox":
        num_mailboxes = 2 if model.usage.bytes_between_islands else 1  # another one for the sums of other islands
        text += f", at most {num_mailboxes * decision.settings.mailbox_bytes >> 10:,} KiB of mailbox per rank"
    return f"{text} (reasons: odc-mpi doctor)"


def _describe_caches(config: Config, model: ShardedModel) -> str:
    parts, needs, capacity = [], model.cache_needs.maximum, model.cache_bytes
    shared = f"once per node, {model.usage.node_cache_bytes / 2**20:,.1f} MiB per rank"
    without_cache = shared if model.usage.node_cache_bytes else "zero-copy"
    for kind, setting, available, needed, not_needed in (
        ("parameters", config.comm.parameter_cache_bytes, capacity.parameters, needs.parameters, without_cache),
        ("gradients", config.comm.gradient_cache_bytes, capacity.gradients, needs.gradients, "none needed"),
    ):
        part = f"{min(available, needed) / 2**20:,.1f} of {needed / 2**20:,.1f} MiB per rank"
        text = f"{part}{' (auto)' if setting == 'auto' else ''}" if needed else not_needed
        parts.append(f"{kind}: {text}")
    return "; ".join(parts)


def numel(model: ShardedModel, trainable: bool | None = None) -> int:
    """Return the number of elements in the trainable (True), frozen (False) or all (None) parameters."""
    layouts = (layout for layout in model.layouts if trainable in (None, layout.trainable))
    return sum(parameter.spec.numel for layout in layouts for parameter in layout.ranges)


def describe_ranks(world: World) -> dict[str, Any]:
    """Return the fields of summary.json about the ranks."""
    return {
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "hosts": [host for host, _ in world.layout],
        "ranks_per_node": [count for _, count in world.layout],
    }


def summary_fields(config: Config, world: World, decision: Decision, model: ShardedModel) -> dict[str, Any]:
    """Return the fields of summary.json that describe the ranks, the transport and the model."""
    return {
        **describe_ranks(world),
        "num_islands": model.num_islands,
        **slurm_job(),
        "reduction": decision.reduction.value,
        "balance": config.data.balance,
        "zero_copy": decision.zero_copy.value,
        "progress": decision.progress.value,
        "window_device": window_device.value if (window_device := decision.window_device) else "cpu",
        "param_dtype": config.model.param_dtype,
        "num_parameters": numel(model),
        "num_trained_parameters": numel(model, True),
        "device": str(model.device),
        "mpi_library": world.mpi_library,
        "decision": decision.to_dict(),
        "run_dir": config.run.dir,
    }
