"""Functions that shard a module across MPI ranks, and that choose the device and how the ranks communicate."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from odc_mpi.comm.device.device import Device, find_device, gpu_uuid
from odc_mpi.comm.device.device_memory import OPTIMIZER_BYTES, device_shard_bytes, fit_objection, free_device_bytes
from odc_mpi.comm.factory import single_rank_transport, staged, window_transport
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.transport import Transport
from odc_mpi.comm.windows.device_window import mapping_error
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.probe.decision import Decision, decide, require_correct_data
from odc_mpi.probe.probe import cached_or_new_report, environment_report
from odc_mpi.probe.report import ProbeReport
from odc_mpi.runtime.library import has_thread_serialized, thread_level
from odc_mpi.runtime.memory import available_bytes, free_shm_bytes
from odc_mpi.runtime.world import World
from odc_mpi.shard.cache_budget import auto_cache_bytes, node_cache_fits, warn_about_budgets
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.partition import UnitChoice, is_sharded


def shard_model(
    module: nn.Module,
    world: World,
    *,
    units: Iterable[UnitChoice] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    weights: WeightSource | None = None,
    comm: CommConfig | Decision = CommConfig(),
    islands: Islands | None = None,
    device: str = "cpu",
    optimizer_device: str = "cpu",
) -> ShardedModel:
    """Shard the parameters of a module across the ranks of `world`. Collective.

    Args:
        module: Module to shard. It is modified in place: its parameters are replaced with placeholders. If the initial
            values differ between ranks, those of rank 0 are used.
        units: Classes, class names or instances of submodules, such as transformer blocks; by default, the classes in
            `module._no_split_modules`. The parameters of each matching submodule form a unit and are fetched together.
            All other parameters form the root unit, which stays unsharded until the minibatch ends.
        param_dtype: Dtype in which parameters are stored, fetched and used in computation. By default, each parameter
            keeps its dtype. Slices of trainable parameters narrower than float32 have float32 copies for the optimizer.
        reduce_dtype: Dtype in which gradients are summed: float32, float64, or int64 for fixed-point numbers, whose
            sums do not depend on the order of addition (docs/exact.md). The default is the widest of float32 and the
            dtypes in which trainable parameters are stored.
        activation_checkpointing: True to save only the inputs of units, and recompute activations in the backward pass.
        weights: Source of the initial parameter values. By default, they are taken from `module`. If a source is given,
            the parameters of `module` may be on the meta device.
        comm: Settings of communication, or a decision by `decide_for` that is based on them. Sizes of caches may differ
            between ranks, and "auto" uses a share of the computing device's free memory (docs/caching.md). `prefetch`
            is also the maximum number of pushes in flight; each increment beyond 1 requires memory for one more unit
            and its gradients. `timeout_s` has no effect: it is an argument of `World`.
        islands: Islands of `world`, each of which holds all parameters of this one model (docs/islands.md). They
            require windows in host memory. The model closes them.
        device: Device on which the model computes: "cpu" or "cuda". A host's GPUs are assigned to its ranks
            round-robin. Shards are in host memory unless windows on GPUs are chosen (docs/gpu.md). A CUDA
            stream that uses the model must wait for other streams that have used it before.
        optimizer_device: Device of the trainable slices and optimizer state: "cpu", or "cuda" if `device` is "cuda".

    Returns:
        The sharded model, which sums gradients over the microbatches of all ranks that train it.

    Raises:
        ValueError: An entry in `units` matches no submodule, or one without a `forward` method, a dtype is not
            supported, a trainable parameter has no real floating-point dtype, an embedding has `max_norm`, the module
            is already sharded, a parameter is on the meta device although `weights` is None, or an earlier model has
            closed `islands`.
        AllRanksUserError: There is not enough memory for the windows, a setting is not supported by the MPI library,
            the device is not available, CuPy is missing for windows on a GPU, the modules of two ranks differ, or
            `comm` selects windows on GPUs although `islands` is given.
    """
    computing = world.run_on_all(lambda: _device(device, optimizer_device, world.host_rank))
    reduce_dtype = reduce_dtype or _widest_dtype(module, param_dtype)
    usual, dtypes = dtypes_by_parameter(module)
    store_dtype = param_dtype or usual
    if param_dtype:
        dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is torch.uint8}
    if isinstance(comm, CommConfig):
        optimizes = optimizer_device == "cuda"
        size = device_shard_bytes(module, world.size, param_dtype, reduce_dtype, with_optimizer=optimizes)
        decision = decide_for(world, comm, device=device, shard_bytes=size, islands=islands is not None)
    else:
        decision = comm
    chosen = decision.comm
    if islands and decision.windows_on_device:
        raise AllRanksUserError(
            "islands: expected windows in host memory, got windows on GPUs: set comm.window_device to cpu"
        )
    if islands and islands.is_closed:
        raise ValueError("islands: expected new islands for each model, got those that an earlier model has closed")
    if islands and islands.size == 1:
        islands.close()
        islands = None
    sharing = islands.island if islands else world
    is_possible = not islands and chosen.zero_copy != "off" and computing is None
    frozen_bytes = sum(_stored_bytes(p, param_dtype) for p in module.parameters() if not p.requires_grad)
    chosen = _with_frozen_scope(world, frozen_bytes, chosen, is_possible=is_possible)
    if sharing.num_nodes > 1:
        on_host = chosen
        if computing is not None:  # the caches of a rank are in GPU memory
            on_host = replace(chosen, parameter_cache_bytes="auto", gradient_cache_bytes="auto")
        cached = [p for p in module.parameters() if p.requires_grad or chosen.frozen_scope == "world"]
        num_bytes = sum(_stored_bytes(p, param_dtype) for p in cached)
        fits = _fits_node_cache(world, sharing, module, param_dtype, reduce_dtype, on_host, num_bytes)
        wants_cache = chosen.node_cache != "off" and (fits or sharing.local_size == 1)
        # Not over `world`: if islands are not aligned with nodes, some islands span several nodes and others do not.
        chosen = replace(chosen, node_cache="auto" if all(sharing.gather_objects(wants_cache)) else "off")
    transport = _transport(world, computing, store_dtype, reduce_dtype, decision, chosen, islands)
    model = ShardedModel(
        module,
        transport,
        units=units,
        weights=weights,
        activation_checkpointing=activation_checkpointing,
        prefetch=chosen.prefetch,
        optimizer_device=transport.device if optimizer_device == "cuda" else None,
        dtypes=dtypes,
    )
    optimizes_here = computing is None or optimizer_device == "cuda"
    free, num_ranks = free_bytes(world, computing, model if optimizes_here else None)
    model.cache_bytes = auto_cache_bytes(free, num_ranks, model.cache_needs.maximum, chosen)
    if world.rank == 0:
        warn_about_budgets(model.cache_bytes, model.cache_needs)
    return model


def decide_for(
    world: World,
    comm: CommConfig = CommConfig(),
    *,
    device: str = "cpu",
    shard_bytes: int = 0,
    tickets: bool = False,
    islands: bool = False,
) -> Decision:
    """Probe the MPI library and decide how ranks communicate. Collective.

    This takes about 0.1 s on one node, and up to two seconds on several. It is skipped if `comm.is_complete`. The
    results are cached for later runs with the same MPI library, environment and hosts. MPI operations on GPU memory are
    not tried, because they may crash the job: the results of the last `odc-mpi doctor` with the same layout are used.

    Args:
        comm: Settings that take precedence over the results of the probe.
        device: Device on which the model computes: "cpu" or "cuda".
        shard_bytes: Size of this rank's shards of parameters and gradients, in bytes, and of the optimizer's data if it
            is on the GPU. If `comm.window_device` is "auto", the windows are on the GPUs only if there is enough
            memory.
        tickets: True if ranks claim microbatches with `Tickets`. Wrong results of MPI_Fetch_and_op then cause an error.
        islands: True if islands will share the model, which requires windows in host memory.

    Raises:
        AllRanksUserError: A setting is not supported by the MPI library, the device is not available, or an operation
            that would be used delivered wrong data in the probe.
    """
    # An operation may crash, so it is only tried if a choice depends on the result.
    is_known = comm.is_complete
    report = environment_report(world) if is_known else cached_or_new_report(world, with_speeds=device != "cpu")
    computing = world.run_on_all(lambda: find_device(device, world.host_rank))
    not_mapped, objection = None, "islands exchange parameters through host memory" if islands else None
    if computing is not None and comm.window_device != "cpu" and not islands:
        if world.num_nodes == 1 and (world.size > 1 or comm.zero_copy == "off"):
            not_mapped = mapping_error(world, computing) or ""
        objection = fit_objection(world, computing, shard_bytes)
        report = _with_device_report(report, world, computing)
    on_device = computing is not None
    decision = world.run_on_all(
        lambda: decide(report, comm, on_device=on_device, mapping_error=not_mapped, device_objection=objection)
    )
    world.run_on_all(lambda: require_correct_data(report, decision, tickets=tickets))
    return decision


def choose_device(world: World) -> tuple[str, str]:
    """Choose the device for `run.device: auto`: "cuda" if each rank has its own GPU, otherwise "cpu". Collective.

    Returns the device and a string that explains the choice. Both are the same on all ranks.
    """
    # By identity: ranks bound to one GPU each see the same number of GPUs as ranks that share one.
    uuids = world.gather_objects(gpu_uuid(world.host_rank))
    if None not in uuids and len(set(uuids)) == world.size:
        return "cuda", "each rank has a GPU"
    if not any(uuids):
        sees = "only an Intel XPU, which is not supported" if torch.xpu.is_available() else "no GPU"
        return "cpu", f"torch finds {sees}"
    if None in uuids:
        return "cpu", f"rank {uuids.index(None)} has no GPU"
    return "cpu", f"{world.size} ranks share {'a GPU' if len(set(uuids)) == 1 else f'{len(set(uuids))} GPUs'}"


def free_bytes(world: World, device: Device | None, optimized: ShardedModel | None = None) -> tuple[int, int]:
    """Return the free memory of the computing device in bytes, and the number of ranks that share this device.

    Collective if `device` is given. `optimized` is the model if its optimizer runs on the same device. The memory that
    the optimizer state will need is then subtracted.
    """
    free, num_ranks = available_bytes(), world.host_size
    if device is not None:
        free, num_ranks = free_device_bytes(world, device)
    state_bytes = OPTIMIZER_BYTES * sum(p.numel() for p in optimized.shard_parameters()) if optimized else 0
    return free - num_ranks * state_bytes, num_ranks


def _stored_bytes(parameter: nn.Parameter, param_dtype: torch.dtype | None) -> int:
    """Return the size in bytes of a parameter in the shards of all ranks. `param_dtype` does not apply to bytes."""
    dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
    return parameter.numel() * dtype.itemsize


def _with_frozen_scope(world: World, num_bytes: int, comm: CommConfig, *, is_possible: bool) -> CommConfig:
    """Return the settings with "node" or "world" as `frozen_scope`, for frozen parameters of `num_bytes`. Collective.

    On one node, this is "world". "auto" is "node" if `is_possible` and `frozen_fit_on_node` on all nodes. "node" is not
    checked for memory here.
    """
    if comm.frozen_scope == "world" or world.num_nodes == 1 or not num_bytes:
        return replace(comm, frozen_scope="world")
    if not is_possible and comm.frozen_scope == "node":
        raise AllRanksUserError(
            "comm.frozen_scope: node requires comm.zero_copy auto, islands.by off and run.device cpu: set it to auto"
        )
    fits = all(world.gather_objects(frozen_fit_on_node(num_bytes, world.local_size, comm)))
    return replace(comm, frozen_scope="node" if comm.frozen_scope == "node" or (is_possible and fits) else "world")


def frozen_fit_on_node(num_bytes: int, ranks_per_node: int, comm: CommConfig) -> bool:
    """Return True if `num_bytes` fit into the share of this node's free memory for caches, and half of /dev/shm."""
    shm_bytes, budget = free_shm_bytes(), replace(comm, parameter_cache_bytes="auto")
    fits = node_cache_fits(num_bytes, available_bytes(), ranks_per_node, budget)
    return fits and (shm_bytes is None or num_bytes <= shm_bytes // 2)


def _fits_node_cache(
    world: World,
    sharing: World,
    module: nn.Module,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    comm: CommConfig,
    num_bytes: int,
) -> bool:
    """Return True if this node has memory for full copies, of `num_bytes`, in addition to the shards of the model.

    `sharing` contains the ranks of `world` that shard the model: all, or those of an island. `param_dtype` is the dtype
    of all parameters; None if each keeps its own.
    """
    inbox_bytes = comm.mailbox_bytes if comm.reduction == "mailbox" else 0
    # Ranks of other islands on this node take as much memory per rank as those of this island.
    num_bytes = num_bytes * world.local_size // sharing.local_size
    # Not allocated yet: the windows of this node, its optimizer states, and fp32 copies of narrow parameters.
    window_bytes, all_bytes = (
        world.local_size
        * (inbox_bytes + device_shard_bytes(module, sharing.size, param_dtype, reduce_dtype, with_optimizer=optimizer))
        for optimizer in (False, True)
    )
    shm_bytes = free_shm_bytes()
    if shm_bytes is not None and num_bytes + window_bytes > shm_bytes:
        return False
    return node_cache_fits(num_bytes, available_bytes() - all_bytes, world.local_size, comm)


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
    """Return the report with any cached results of `odc-mpi doctor` for windows on devices added. Collective."""
    # Imported late: only needed with a GPU.
    from odc_mpi.probe.device_probe import load_device_report

    cached = load_device_report(world, device)
    if cached is None:
        return report
    problems = [problem for problem in cached.problems if problem.startswith("device ")]
    return replace(report, device=cached.device, problems=(*report.problems, *problems))


def _transport(
    world: World,
    device: Device | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    decision: Decision,
    comm: CommConfig,
    islands: Islands | None,
) -> Transport:
    if device is not None and decision.windows_on_device and comm.zero_copy != "off":
        return single_rank_transport(world, device, param_dtype, reduce_dtype)
    window_device = device if decision.windows_on_device else None
    transport = window_transport(
        world, param_dtype, reduce_dtype, comm, device=window_device, mapped=decision.maps_devices, islands=islands
    )
    return transport if device is None or window_device is not None else staged(transport, device)


def _widest_dtype(module: nn.Module, param_dtype: torch.dtype | None) -> torch.dtype:
    """Return the widest of float32 and the dtypes of the trainable parameters, or of `param_dtype` if it is given."""
    if param_dtype is not None:
        return torch.promote_types(param_dtype, torch.float32)
    trained = {p.dtype for p in module.parameters() if p.requires_grad and p.is_floating_point()}
    return functools.reduce(torch.promote_types, trained, torch.float32)


def dtypes_by_parameter(module: nn.Module) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """Return the dtype with the most parameter elements, and any dtypes that differ from it, keyed by parameter name.

    Only parameters that are sharded are considered. Bytes never count as the first result, which is float32 if there
    are no floating-point parameters.
    """
    parameters = {name: p for name, p in module.named_parameters() if is_sharded(p)}
    counts: Counter[torch.dtype] = Counter()
    for parameter in filter(torch.is_floating_point, parameters.values()):
        counts[parameter.dtype] += parameter.numel()
    usual = counts.most_common(1)[0][0] if counts else torch.float32
    return usual, {name: p.dtype for name, p in parameters.items() if p.dtype != usual}
