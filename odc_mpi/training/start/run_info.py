"""Descriptions of a run: lines to print at start-up, and fields of summary.json about ranks, transport and model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from typing_extensions import override

from odc_mpi.comm.context_parallel.kv_windows import KVSizes
from odc_mpi.formatting import truncate_text
from odc_mpi.models.quantization.linear import hidden_numel
from odc_mpi.observe.callback import Callback
from odc_mpi.observe.metrics import DETAILS, MACHINE, Metric
from odc_mpi.probe.decision import Decision
from odc_mpi.runtime.job_info import describe_layout, slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.rundir.prefix_cache import describe_prefix
from odc_mpi.training.rundir.resume import start_line
from odc_mpi.training.settings import Config, default_learning_rate


def startup_lines(context: RunContext) -> str:
    """Return the text to print before the first step."""
    config, world, inputs, notes = context.config, context.world, context.inputs, context.notes
    decision, resume_point, model = context.decision, context.resume_point, context.model
    data, packing = config.data, inputs.model.packing
    dtype = f"{config.model.param_dtype}{notes.get('model.param_dtype', '')}"
    per_step = recipe_of(config).describe_samples(config)
    num_steps = "1 step" if config.run.steps == 1 else f"{config.run.steps:,} steps"
    num_epochs = inputs.loader.num_epochs(config.run.steps - (resume_point.step if resume_point else 0))
    num_trainable, num_parameters = numel(model, True), numel(model)
    trainable = f"{num_parameters:,} parameters"
    if num_trainable < num_parameters:
        share = num_trainable / num_parameters
        trainable = f"{num_trainable:,} of {num_parameters:,} parameters trainable ({share:.1%})"
    if config.lora.r is not None:
        trainable += f", LoRA r={config.lora.r}"
    if quantization := inputs.model.quantization:
        trainable += f" over 4-bit weights ({quantization['bnb_4bit_quant_type']})"
    # Printed in advance: if a rank is killed, the launcher ends the others before they can print anything.
    every = config.run.checkpoint_every
    saved = f"saved every {every} steps, from where the same command resumes" if every else "saved after the last step"
    lines = {
        "ranks": f"{world.size} {describe_layout(world.layout, slurm_job())}; {world.mpi_library}",
        **_islands_line(context),
        "model": f"{type(model.module).__name__}, {trainable}, {dtype}, {model.device}{notes.get('run.device', '')}",
        **({"weights": notes["model.path"]} if "model.path" in notes else {}),
        "data": f"{data.path}: {len(inputs.dataset):,} {per_step}, {num_steps} ({num_epochs:.3g} epochs)",
        **_packing_lines(context),
        **({"attn": "eager, because the scores have soft caps"} if packing.soft_caps else {}),
        **({"cp": _describe_context_parallel(inputs.context_parallel)} if inputs.context_parallel else {}),
        "optim": f"{config.optim.optimizer}, learning rate {config.optim.learning_rate:g}{notes.get('optim.lr', '')}, "
        f"{config.optim.lr_scheduler_type}",
        "comm": _describe_comm(world, model, decision),
        "caches": _describe_caches(config, model),
        **_frozen_line(world, model),
        "output": f"{config.run.dir}, {saved}",
    }
    if config.lora.r is not None and config.lora.target_modules == "all-linear":
        from odc_mpi.models.adapters.add import left_out  # imported late, as in `inputs`

        if names := left_out(inputs.model.module):
            lines["lora"] = f"all-linear left out: {', '.join(names)} (set lora.target_parameters)"
    usual = default_learning_rate(config)
    if config.model.path is not None and cast(float, config.optim.learning_rate) > 10 * usual:
        lines["WARNING"] = f"optim.learning_rate is more than 10 times {usual:g}, the default of this objective"
    start = start_line(config, resume_point)
    if resume_point and "islands" in resume_point.metadata and not resume_point.continues_island(context.part):
        start += "; begins with the merged parameters, and the optimizer state of one island"
    return "\n".join([*(f"{name:<8}{text}" for name, text in lines.items()), *filter(None, [start])])


def _packing_lines(context: RunContext) -> dict[str, str]:
    inputs, packing = context.inputs, context.inputs.model.packing
    if context.prefix:
        return {"prefix": f"{describe_prefix(context.config, inputs)}, {context.prefix.store.num_tokens:,} stored"}
    if packing.packs:
        return {}
    rows = recipe_of(context.config).data == "sequences" and packing.pads_rows
    how = "padded rows of sequences of like length" if rows else "one sequence per microbatch"
    return {"packing": f"off, {how}: {packing.unpacked_reason}"}


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


def describe_frozen(num_bytes: int, num_ranks: int, ranks_per_node: int, *, on_node: bool) -> str:
    """Return a description of the memory for frozen parameters of `num_bytes`, and of what another setting would do."""
    all_ranks, node = (f"{num_bytes / count / 2**20:,.1f} MiB per rank" for count in (num_ranks, ranks_per_node))
    if on_node:
        return f"{node}: each node holds all frozen parameters ({all_ranks} with comm.frozen_scope world)"
    return f"{all_ranks}: divided among all ranks ({node} with comm.frozen_scope node, where each node holds all)"


def _frozen_line(world: World, model: ShardedModel) -> dict[str, str]:
    if (
        world.num_nodes == 1
        or model.device.type != "cpu"
        or not (num_bytes := model.frozen_bytes)
        or model.num_islands > 1
    ):
        return {}
    on_node = any(layout.node_ranks for layout in model.layouts)
    return {"frozen": describe_frozen(num_bytes, world.size, world.local_size, on_node=on_node)}


def numel(model: ShardedModel, trainable: bool | None = None) -> int:
    """Return the number of elements in the trainable (True), frozen (False) or all (None) parameters."""
    layouts = (layout for layout in model.layouts if trainable in (None, layout.trainable))
    count = sum(parameter.spec.numel for layout in layouts for parameter in layout.ranges)
    return count if trainable else count + hidden_numel(model.module)


@dataclass
class RunInfo(Callback):
    """Adds entries to the summary that describe the ranks, the transport and the model."""

    config: Config
    world: World
    decision: Decision
    model: ShardedModel

    _values: ClassVar[Mapping[Metric, Callable[["RunInfo"], Any]]] = {
        Metric("num_parameters", "parameters", MACHINE, "end"): lambda run: numel(run.model),
        Metric("num_trained_parameters", "trained parameters", MACHINE, "end"): lambda run: numel(run.model, True),
        Metric("param_dtype", "type of parameters", MACHINE, "end"): lambda run: run.config.model.param_dtype,
        Metric("device", "device", MACHINE, "end"): lambda run: str(run.model.device),
        Metric("world_size", "ranks", MACHINE, "end"): lambda run: run.world.size,
        Metric("num_nodes", "nodes", MACHINE, "end"): lambda run: run.world.num_nodes,
        Metric("hosts", "hosts", MACHINE, "end"): lambda run: [host for host, _ in run.world.layout],
        Metric("ranks_per_node", "ranks of each node", DETAILS, "end"): lambda run: [n for _, n in run.world.layout],
        Metric("num_islands", "islands", DETAILS, "end"): lambda run: run.model.num_islands,
        Metric("slurm_job_id", "slurm job id", summary="end"): lambda run: slurm_job().get("slurm_job_id"),
        Metric("slurm_restarts", "slurm restarts", summary="end"): lambda run: slurm_job().get("slurm_restarts"),
        Metric("mpi_library", "MPI library", MACHINE, "end", row="MPI library"): lambda run: run.world.mpi_library,
        Metric("window_device", "window memory", MACHINE, "end"): lambda run: (
            run.decision.window_device.value if run.decision.window_device else "cpu"
        ),
        Metric("zero_copy", "zero-copy reads on a node", MACHINE, "end"): lambda run: run.decision.zero_copy.value,
        Metric("reduction", "gradients travel by", MACHINE, "end"): lambda run: run.decision.reduction.value,
        Metric("progress", "progress thread", MACHINE, "end"): lambda run: run.decision.progress.value,
        Metric("decision", "how ranks communicate, and why", DETAILS, "end"): lambda run: run.decision.to_dict(),
        Metric("balance", "balance of work", MACHINE, "end"): lambda run: run.config.data.balance,
        Metric("run_dir", "run directory", MACHINE, "end", "{}", row="run directory"): lambda run: run.config.run.dir,
    }
    metrics = tuple(_values)

    @override
    def on_train_end(self) -> dict[str, Any]:
        values = {metric.key: compute(self) for metric, compute in self._values.items()}
        return {key: value for key, value in values.items() if value is not None}
