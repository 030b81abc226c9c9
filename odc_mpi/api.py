"""`shard_model`, the call with which users shard a module over the ranks of a world, and its choice of a transport."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.comm.factory import (
    collective_transport,
    device_transport,
    gradient_store_factories,
    single_rank_transport,
    staged,
    window_transport,
)
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError, warn
from odc_mpi.probe.decision import CommSettings, Decision, decide, decide_collective, require_correct_data
from odc_mpi.probe.probe import cached_or_quick_report, environment_report
from odc_mpi.probe.report import ProbeReport
from odc_mpi.runtime.library import has_thread_serialized, thread_level
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World
from odc_mpi.shard.cache_budget import CacheBytes, CacheNeeds, auto_cache_bytes
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import UnitChoice

#: Bytes of AdamW's state for each trainable element: two moments in fp32.
OPTIMIZER_BYTES = 8


def shard_model(
    module: nn.Module,
    world: World,
    *,
    units: Iterable[UnitChoice] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    prefetch: int = 1,
    weights: WeightSource | None = None,
    decision: Decision | None = None,
    mailbox_bytes: int = DEFAULT_MAILBOX_BYTES,
    parameter_cache_bytes: int | Literal["auto"] = "auto",
    gradient_cache_bytes: int | Literal["auto"] = "auto",
    device: str = "cpu",
    optimizer_device: str = "cpu",
) -> ShardedModel:
    """Move a module's parameters into MPI windows, one shard on each rank. Collective.

    Args:
        module: Any module. If its values differ between ranks, those of rank 0 are used.
        units: Classes, class names or submodules whose parameters are fetched together, such as a transformer's block;
            by default the module's `_no_split_modules`. All other parameters form the root unit, which stays unsharded
            for the whole minibatch.
        param_dtype: Type in which parameters are stored, fetched and computed with. By default each parameter keeps its
            type, such as fp32 adapters on a frozen bf16 base. If the type is narrower than fp32, owners keep an fp32
            master copy of their trainable slices for the optimizer.
        reduce_dtype: Type in which gradients are summed: float32 or float64, by default the wider of float32 and the
            types of the trainable parameters; int64 selects 64-bit fixed-point numbers, whose sums do not depend on
            their order (docs/exact.md).
        activation_checkpointing: True to keep only the inputs of each unit, and recompute its forward in the backward.
        prefetch: Number of units to fetch ahead, overlapped with computation. Each beyond the first needs memory for
            one more unit. With 0 no thread is started; with 1 or more, a thread also pushes the gradients.
        weights: Source of the initial parameters. The module may then be on the meta device. Default: the module.
        decision: How ranks reach each other; by default the choice of `decide_for` for windows. With
            `decide_for(world, transport="collective")` the model communicates like FSDP, for comparison: every rank
            must run the same number of microbatches, and nothing is prefetched (docs/ordering.md).
        mailbox_bytes: Memory of this rank for incoming gradients if they are sent through a mailbox.
        parameter_cache_bytes: Memory of the computing device for units that stay unsharded until the end of the
            minibatch; may differ between ranks. By default a share of the free memory (docs/caching.md).
        gradient_cache_bytes: The same for accumulated gradients, each of which is then pushed once per minibatch.
        device: Device that computes: cpu, or cuda for the GPU with this rank's number on the node. Shards are on the
            host, and a GPU only holds parameters of units in use, unless `decision` has windows on GPUs (docs/gpu.md).
        optimizer_device: cpu, or cuda to keep the trainable slices and the optimizer's state on the GPU.

    Returns:
        The model. Gradients of all microbatches of all ranks are summed.

    Raises:
        ValueError: No parameter is trainable, a unit matches no module, or a parameter has no values.
        UserError: Too little memory for windows, no such device, windows on a GPU without CuPy, or invalid cache size.
    """
    computing = world.run_on_all(lambda: _device(device, optimizer_device, world.host_rank))
    world.run_on_all(lambda: _check_caches(parameter_cache_bytes, gradient_cache_bytes))
    reduce_dtype = reduce_dtype or _widest_dtype(module, param_dtype)
    param_dtype, dtypes = (param_dtype, {}) if param_dtype else _dtypes_by_parameter(module)
    decision = decision or decide_for(world, device=device)
    transport = _transport(world, computing, param_dtype, reduce_dtype, decision, mailbox_bytes)
    model = ShardedModel(
        module,
        transport,
        units=units,
        weights=weights,
        activation_checkpointing=activation_checkpointing,
        prefetch=prefetch,
        optimizer_device=transport.device if optimizer_device == "cuda" else None,
        dtypes=dtypes,
    )
    optimizes_here = computing is None or optimizer_device == "cuda"
    free_bytes, num_ranks = _free_bytes(world, computing, model if optimizes_here else None)
    needs = model.cache_needs
    model.cache_bytes = auto_cache_bytes(
        free_bytes, num_ranks, needs.maximum, parameter_cache_bytes, gradient_cache_bytes
    )
    if world.rank == 0:
        _warn_about_budgets(model.cache_bytes, needs)
    return model


def decide_for(
    world: World,
    *,
    transport: str = "window",
    zero_copy: str = "auto",
    reduction: str = "auto",
    progress: str = "auto",
    window_device: str = "auto",
    device: str = "cpu",
    tickets: bool = False,
) -> Decision:
    """Probe this MPI stack and decide how ranks reach each other. Collective; up to two seconds.

    Nothing is probed if no setting is auto. Windows on GPUs are never probed here, since a trial may end the job: the
    results of `odc-mpi doctor` in the same layout are used. The results are cached for the next run on the same stack,
    in `$XDG_CACHE_HOME/odc_mpi` or `~/.cache/odc_mpi`.

    Args:
        transport: window, or collective: all-gather and reduce-scatter on the host, the baseline. It needs no probe.
        zero_copy: auto, or off: a rank copies parameters of other ranks on its node instead of reading mapped memory.
        reduction: How gradients reach their owners: auto, accumulate or mailbox.
        progress: auto, off, or thread: a progress thread answers requests of other ranks during the computation.
        window_device: Device of the windows of a model that computes on GPUs: auto, cuda or cpu.
        tickets: True if ranks claim microbatches by `Tickets`; then wrong results of Fetch_and_op are an error, too.

    Raises:
        UserError: A setting is invalid or not supported by this MPI, or an operation in use delivered wrong data.
    """
    if transport not in ("window", "collective"):
        raise UserError(f"transport: expected window or collective, got {transport}")
    settings = CommSettings(zero_copy, reduction, progress, window_device)
    if transport == "collective":
        if settings != CommSettings() or device != "cpu":
            raise UserError(
                "transport: collective computes on the host and uses no other setting: leave them at their defaults"
            )
        return decide_collective()
    # An operation may crash, so it is only tried if a choice depends on the result.
    report = environment_report(world) if settings.is_complete else cached_or_quick_report(world)
    computing = world.run_on_all(lambda: find_device(device, world.host_rank))
    if computing is not None and window_device != "cpu":
        report = _with_device_report(report, world, computing)
    decision = world.run_on_all(lambda: decide(report, settings, on_device=computing is not None))
    world.run_on_all(lambda: require_correct_data(report, decision, tickets=tickets))
    return decision


def _free_bytes(world: World, device: Device | None, optimized: ShardedModel | None) -> tuple[int, int]:
    """Return the free bytes of the computing device without the optimizer's state, and the number of ranks there."""
    free, num_ranks = available_bytes(), world.host_size
    if device is not None:
        free, num_ranks = device.free_bytes(), -(-world.host_size // device.num_visible)
    state_bytes = OPTIMIZER_BYTES * sum(p.numel() for p in optimized.shard_parameters()) if optimized else 0
    return free - num_ranks * state_bytes, num_ranks


def _check_caches(parameters: object, gradients: object) -> None:
    for setting, value in (("parameter_cache_bytes", parameters), ("gradient_cache_bytes", gradients)):
        if value != "auto" and (not isinstance(value, int) or value < 0):
            raise UserError(f"{setting}: expected auto or a number of bytes, 0 or more, got {value!r}")


def _warn_about_budgets(requested: CacheBytes, needs: CacheNeeds) -> None:
    for kind, budget, minimum in (
        ("parameter", requested.parameters, needs.minimum.parameters),
        ("gradient", requested.gradients, needs.minimum.gradients),
    ):
        if 0 < budget < minimum:
            warn(
                f"comm.{kind}_cache_bytes: expected at least {minimum}, the size of the smallest unit, got {budget}: "
                "nothing is cached"
            )


def _device(device: str, optimizer_device: str, host_rank: int) -> Device | None:
    for setting, value in (("run.device", device), ("optim.device", optimizer_device)):
        if value not in ("cpu", "cuda"):
            raise UserError(f"{setting}: expected cpu or cuda, got {value}")
    if optimizer_device == "cuda" and device == "cpu":
        raise UserError("optim.device: cuda requires run.device cuda, got run.device cpu: set optim.device to cpu")
    if device == "cuda" and not has_thread_serialized():
        raise UserError(
            "run.device: cuda requires MPI_THREAD_SERIALIZED, as torch runs a backward on a GPU in another thread, got "
            f"{thread_level()}: set run.device to cpu, or leave mpi4py.rc.thread_level at its default"
        )
    return find_device(device, host_rank)


def _with_device_report(report: ProbeReport, world: World, device: Device) -> ProbeReport:
    """Add the cached results of `odc-mpi doctor` about windows on these devices. Collective."""
    # Imported late: only needed with a GPU.
    from odc_mpi.probe.device_probe import load_device_report

    cached = load_device_report(world, device)
    if cached is None:
        return report
    problems = [problem for problem in cached.problems if problem.where[:1] in (("device",), ("from_device",))]
    return replace(report, device=cached.device, problems=(*report.problems, *problems))


def _transport(
    world: World,
    device: Device | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    decision: Decision,
    mailbox_bytes: int,
) -> Transport:
    reduction, progress = decision.reduction.value, decision.progress.value == "thread"
    zero_copy = decision.zero_copy.value == "on"
    if device is not None and decision.windows_on_device:
        if zero_copy:
            return single_rank_transport(world, device, param_dtype, reduce_dtype)
        return device_transport(
            world,
            device,
            param_dtype,
            reduce_dtype,
            reduction=reduction,
            mailbox_bytes=mailbox_bytes,
            progress=progress,
        )
    if decision.transport == "collective":
        if device is not None:
            raise UserError("device: expected cpu with collectives, got cuda: set device to cpu")
        return collective_transport(world, param_dtype, reduce_dtype)
    host = window_transport(
        world,
        param_dtype,
        reduce_dtype,
        zero_copy=zero_copy,
        reduction=gradient_store_factories(mailbox_bytes)[reduction],
        progress=progress,
    )
    return host if device is None else staged(host, device)


def _widest_dtype(module: nn.Module, param_dtype: torch.dtype | None) -> torch.dtype:
    """Return the wider of float32 and the type of the trainable parameters."""
    if param_dtype is not None:
        return torch.promote_types(param_dtype, torch.float32)
    trained = {p.dtype for p in module.parameters() if p.requires_grad and p.is_floating_point()}
    return functools.reduce(torch.promote_types, trained, torch.float32)


def _dtypes_by_parameter(module: nn.Module) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """Return the type of most elements of a module's parameters, and by name the parameters of another type."""
    parameters = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters.values():
        counts[parameter.dtype] += parameter.numel()
    usual = counts.most_common(1)[0][0] if counts else torch.float32
    return usual, {name: p.dtype for name, p in parameters.items() if p.dtype != usual}
