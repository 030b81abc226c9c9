"""Shard a module over the ranks of a world: the choice of transport, and the call that users make."""

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
from odc_mpi.probe.decision import CommSettings, Decision, decide, decide_collective, refuse_wrong_data
from odc_mpi.probe.probe import cached_or_quick_report, environment_report
from odc_mpi.probe.report import ProbeReport
from odc_mpi.runtime.library import has_thread_serialized, thread_level
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World
from odc_mpi.shard.cache_budget import CacheBytes, CacheNeeds, auto_cache_bytes
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import UnitChoice

#: What AdamW keeps for each element that it optimizes: two moments in fp32.
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
    """Move a module's parameters into MPI windows, a shard on every rank. Collective.

    Args:
        module: Any module. Where ranks hold different values, those of rank 0 count.
        world: The ranks.
        units: Classes, class names or submodules whose parameters are fetched together, such as a transformer's block;
            by default the module's `_no_split_modules`. All other parameters form the root unit, which stays for a
            whole minibatch.
        param_dtype: Type in which parameters are hosted, fetched and computed with; by default each has its own, as
            adapters in fp32 over a frozen base in bf16. Where the type is narrower than fp32, owners keep an fp32
            master of their trainable slices for the optimizer.
        reduce_dtype: Type in which gradients are summed: float32 or float64, by default the wider of float32 and the
            types of the trainable parameters; or int64, which stands for 64-bit fixed-point numbers, whose sums do not
            depend on their order (docs/exact.md).
        activation_checkpointing: Keep only the inputs of each unit for the backward, and run its forward again there.
        prefetch: How many units to fetch ahead of their use, beside the computation; each beyond the first takes memory
            for one more unit. With 0 no thread is started; with 1 or more, gradients are pushed from a thread, too.
        weights: Where initial parameters come from if not from the module, which may then be on the meta device.
        decision: How ranks reach each other; by default what `decide_for` finds best over windows. With
            `decide_for(world, transport="collective")` the model does what FSDP does, for comparison: every rank must
            then run the same number of microbatches, and nothing is prefetched (docs/ordering.md).
        mailbox_bytes: Where gradients go through a mailbox: memory on this rank for gradients on their way to it.
        parameter_cache_bytes: Memory on this rank for fetched units that stay until the end of the minibatch, where the
            model computes. By default what is free there, by the rule of docs/caching.md; ranks need not agree.
        gradient_cache_bytes: The same for gradients, which are then added up and pushed once a minibatch.
        device: Where the model computes: cpu, or cuda, of a node's GPUs the one with this rank's local number. The
            shards are on the host, and a GPU holds no parameters but those of the units in use, unless `decision` has
            windows on the GPUs (docs/gpu.md).
        optimizer_device: cpu, or cuda: the slices to optimize are then on the GPU, with whatever the optimizer keeps.

    Returns:
        The model. Gradients of all microbatches of all ranks are summed.

    Raises:
        ValueError: Nothing to train, units that match nothing, parameters without values.
        UserError: Too little memory for the windows; no such device; windows on a GPU without CuPy; a cache
            size that is none.
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
    """Probe this MPI stack and decide how ranks reach each other. Collective; takes up to two seconds.

    If every setting is given, nothing is probed. Windows on GPUs are never probed here, since a trial may end the job:
    the findings of `odc-mpi doctor` in the same layout count.

    The findings are cached for the next run on the same stack, in `$XDG_CACHE_HOME/odc_mpi` or `~/.cache/odc_mpi`.

    Args:
        world: The ranks.
        transport: window, or collective: all-gather and reduce-scatter on the host, the baseline. It needs no probe.
        zero_copy: auto, or off: ranks of a node do not read each other's parameters in place.
        reduction: auto, or how gradients reach their owners: accumulate or mailbox.
        progress: auto, or whether a thread serves other ranks while this one computes: off or thread.
        window_device: auto, or where the windows are of a model that computes on GPUs: cuda or cpu.
        device: Where the model computes, as `shard_model` has it.
        tickets: Whether microbatches are drawn (`Tickets`), so that drawing has to be right, too.

    Raises:
        UserError: A value that a setting does not have, or that this MPI cannot grant; or what would be used delivered
            wrong data.
    """
    if transport not in ("window", "collective"):
        raise UserError(f"transport: expected window or collective, got {transport}")
    wishes = CommSettings(zero_copy, reduction, progress, window_device)
    if transport == "collective":
        if wishes != CommSettings() or device != "cpu":
            raise UserError("transport: collective computes on the host and has no other choice: leave the others out")
        return decide_collective()
    # An operation that crashes here must not be tried if nothing depends on the answer.
    report = environment_report(world) if wishes.is_complete else cached_or_quick_report(world)
    computing = world.run_on_all(lambda: find_device(device, world.host_rank))
    if computing is not None and window_device != "cpu":
        report = _with_device_report(report, world, computing)
    decision = world.run_on_all(lambda: decide(report, wishes, on_device=computing is not None))
    world.run_on_all(lambda: refuse_wrong_data(report, decision, tickets=tickets))
    return decision


def _free_bytes(world: World, device: Device | None, optimized: ShardedModel | None) -> tuple[int, int]:
    """Return the free memory where this rank computes, and how many ranks share it.

    Args:
        world: The ranks.
        device: Where this rank computes.
        optimized: The model, if the state of its optimizer will be there, too.
    """
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
    for kind, budget, least, what in (
        ("parameter", requested.parameters, needs.minimum.parameters, "unit"),
        ("gradient", requested.gradients, needs.minimum.gradients, "unit's gradients"),
    ):
        if 0 < budget < least:
            warn(f"comm.{kind}_cache_bytes: {budget} bytes hold no {what}, the smallest takes {least}: nothing is kept")


def _device(device: str, optimizer_device: str, host_rank: int) -> Device | None:
    for setting, value in (("run.device", device), ("optim.device", optimizer_device)):
        if value not in ("cpu", "cuda"):
            raise UserError(f"{setting}: expected cpu or cuda, got {value}")
    if optimizer_device == "cuda" and device == "cpu":
        raise UserError("optim.device: cuda goes with run.device cuda, got run.device cpu: set optim.device to cpu")
    if device == "cuda" and not has_thread_serialized():
        raise UserError(
            "run.device: cuda needs MPI_THREAD_SERIALIZED, as torch runs a backward on a GPU in a thread of its own; "
            f"this MPI grants {thread_level()}: set it to cpu, or leave mpi4py.rc.thread_level at its default"
        )
    return find_device(device, host_rank)


def _with_device_report(report: ProbeReport, world: World, device: Device) -> ProbeReport:
    """Add what a doctor found about windows on these devices. Collective."""
    # Here, so that nobody without a GPU loads it.
    from odc_mpi.probe.device_probe import load_device_report

    kept = load_device_report(world, device)
    if kept is None:
        return report
    problems = [problem for problem in kept.problems if problem.where[:1] in (("device",), ("from_device",))]
    return replace(report, device=kept.device, problems=(*report.problems, *problems))


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
            raise UserError("device: a model over collectives computes on the host: set it to cpu")
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
    """Return the type of most elements of a module's parameters, and the types of all others by name."""
    own = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    counts: Counter[torch.dtype] = Counter()
    for parameter in own.values():
        counts[parameter.dtype] += parameter.numel()
    usual = counts.most_common(1)[0][0] if counts else torch.float32
    return usual, {name: p.dtype for name, p in own.items() if p.dtype != usual}
