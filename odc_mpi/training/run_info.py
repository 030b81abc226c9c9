"""What a run tells of itself: the lines before its first step, and the facts in its summary."""

from typing import Any

from odc_mpi.probe.decision import Decision
from odc_mpi.runtime.job_info import describe_layout, slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.rundir.resume import ResumePoint, fresh_start_line
from odc_mpi.training.settings import Config


def samples_per_step(config: Config) -> int:
    """Return how many entries of the data a step takes: sequences, or prompts."""
    sequences = config.data.minibatch_sequences
    return sequences // config.rl.num_generations if config.run.objective == "grpo" else sequences


def startup_lines(
    config: Config,
    world: World,
    inputs: Inputs,
    model: ShardedModel,
    decision: Decision,
    resume_point: ResumePoint | None,
) -> str:
    """Return the lines before the first step; why ranks reach each other as they do tells `odc-mpi doctor`."""
    data, dtype = config.data, config.model.param_dtype
    unit = "prompts" if config.run.objective == "grpo" else "sequences"
    share = f"{samples_per_step(config)} in each of {config.run.steps:,} steps"
    if config.run.objective == "grpo":
        share += f", {config.rl.num_generations} completions each"
    trained = f"{_numel(model, True):,} parameters"
    if _numel(model, False):
        trained = f"{_numel(model, True):,} trained of {_numel(model):,} parameters"
    if config.lora.r is not None:
        trained += f", adapters of rank {config.lora.r}"
    lines = {
        "ranks": f"{world.size} {describe_layout(world.layout, slurm_job())}; {world.mpi_library}",
        "model": f"{type(model.module).__name__}, {trained}, {dtype}, on {model.device}",
        "data": f"{data.path}, {len(inputs.dataset):,} {unit}, {share}",
        **inputs.context_parallel.startup_lines(),
        "comm": _describe_comm(config, world, decision),
        "caches": _describe_caches(config, model),
        "output": config.run.dir,
    }
    beginning = f"resuming {resume_point.one_line(config)}" if resume_point else fresh_start_line(config)
    return "\n".join([*(f"{name:<8}{text}" for name, text in lines.items()), *filter(None, [beginning])])


def _describe_comm(config: Config, world: World, decision: Decision) -> str:
    if world.size == 1 and decision.window_device is None:
        return "one rank, with none to exchange with"
    text = decision.one_line()
    if decision.reduction.value == "mailbox":
        text += f", mailbox of {config.comm.mailbox_bytes >> 10:,} KiB per rank at most"
    return f"{text}; why: odc-mpi doctor"


def _describe_caches(config: Config, model: ShardedModel) -> str:
    """Tell what this rank may keep, of what there is to keep."""
    parts, needs, capacity = [], model.cache_needs.maximum, model.cache_bytes
    for kind, setting, available, needed in (
        ("parameters", config.comm.parameter_cache_bytes, capacity.parameters, needs.parameters),
        ("gradients", config.comm.gradient_cache_bytes, capacity.gradients, needs.gradients),
    ):
        part = f"{min(available, needed) / 2**20:,.1f} of {needed / 2**20:,.1f} MiB per rank"
        parts.append(f"{kind} {part}{' (auto)' if setting == 'auto' else ''}" if needed else f"{kind} in place")
    return ", ".join(parts)


def _numel(model: ShardedModel, trainable: bool | None = None) -> int:
    """Return how many elements all, the trainable or the frozen parameters have."""
    layouts = (layout for layout in model.layouts if trainable in (None, layout.trainable))
    return sum(slot.spec.numel for layout in layouts for slot in layout.ranges)


def summary_fields(config: Config, world: World, decision: Decision, model: ShardedModel) -> dict[str, Any]:
    """Return the facts of the machine and the model, for the summary."""
    return {
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "hosts": [host for host, _ in world.layout],
        "ranks_per_node": [count for _, count in world.layout],
        **slurm_job(),
        "reduction": decision.reduction.value,
        "balance": config.data.balance,
        "zero_copy": decision.zero_copy.value,
        "progress": decision.progress.value,
        "window_device": window_device.value if (window_device := decision.window_device) else "cpu",
        "param_dtype": config.model.param_dtype,
        "num_parameters": _numel(model),
        "num_trained_parameters": _numel(model, True),
        "device": str(model.device),
        "mpi_library": world.mpi_library,
        "decision": decision.to_dict(),
        "run_dir": config.run.dir,
    }
