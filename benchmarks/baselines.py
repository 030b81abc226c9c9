"""Baselines for the benchmarks: plain PyTorch, and FSDP2 over gloo.

With FSDP2, all ranks must run the same number of microbatches. A rank with fewer also runs the shortest sequence of the
minibatch, with zero gradients.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from odc_mpi.data.loader import Loader, PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch, read_microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.runtime.world import World
from odc_mpi.training.inputs import build_model
from odc_mpi.training.settings import Config
from odc_mpi.training.update import make_optimizer

HOST = torch.device("cpu")


def build_unsharded_model(config: Config, device: torch.device = HOST) -> nn.Module:
    """Build the model of a configuration, unsharded and in fp32. Raises `UserError` if the settings are invalid."""
    meta_model = build_model(config.model, config.run.seed)
    module = meta_model.module
    parameters = {}
    for name, meta in module.named_parameters():
        # A copy, because a random initialization is cached; in fp32, whatever the dtype in files.
        values = meta_model.weights.read(name, 0, meta.numel()).view(meta.shape).to(device, torch.float32, copy=True)
        parameters[id(meta)] = nn.Parameter(values, requires_grad=meta.requires_grad)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            setattr(part, name, parameters[id(parameter)])
    return cast(Any, module).to(device).train()  # moves the buffers, and keeps their dtypes


class UnshardedBaseline:
    """Plain PyTorch in one process, on the CPU or a GPU: the reference for sharded training.

    Trains without communication on all microbatches of `loader`, which no other contender may use. `module` is the
    model to train on `device`, by default the result of `build_unsharded_model`.
    """

    def __init__(
        self, config: Config, loader: Loader, device: torch.device = HOST, module: nn.Module | None = None
    ) -> None:
        self._max_norm = config.optim.max_grad_norm
        self._loader = loader
        self._device = device
        module = module or build_unsharded_model(config, device)
        self._token_logps = TokenLogps(module)
        self._model = self._prepare(module)
        trainable = [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        shapes = {name: tuple(parameter.shape) for name, parameter in trainable}
        self._optimizer = make_optimizer(config.optim, trainable, shapes)

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch (see `train_speed.Contender`)."""
        minibatch = next(self._loader)
        loss = self._run(minibatch)
        if self._max_norm:
            optimized = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
            nn.utils.clip_grad_norm_(optimized, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item(), minibatch.num_input_tokens

    def _prepare(self, model: nn.Module) -> nn.Module:
        return model

    def _run(self, minibatch: PlannedMinibatch) -> torch.Tensor:
        return run_microbatches(self._token_logps, minibatch, minibatch, device=self._device)


class FSDPBaseline(UnshardedBaseline):
    """FSDP2, which is PyTorch's own sharded training, on CPUs. Use it within `gloo_process_group`.

    Each layer is a parameter group of `fully_shard`, and all other parameters form the root group. Parameters of layers
    are freed after the forward pass and gathered again for the backward pass, as in ZeRO-3. Construction is collective.
    """

    def __init__(self, world: World, config: Config, loader: Loader) -> None:
        self._world = world
        super().__init__(config, loader)

    @override
    def _prepare(self, model: nn.Module) -> nn.Module:
        # Imported late: these imports take a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # The layers are the default units of `shard_model`.
        mesh = init_device_mesh("cpu", (self._world.size,))
        units = set(getattr(model, "_no_split_modules", None) or ())
        for part in model.modules():
            if type(part).__name__ in units:
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    @override
    def _run(self, minibatch: PlannedMinibatch) -> torch.Tensor:
        # FSDP averages gradients over ranks; the loss needs their sum.
        loss = run_microbatches(self._token_logps, minibatch, minibatch, factor=self._world.size)
        run_microbatches(self._token_logps, minibatch, dummy_microbatches(minibatch), factor=0.0)
        return loss


@contextmanager
def gloo_process_group(world: World) -> Iterator[None]:
    """Context manager that provides a gloo process group of all ranks, which must be on one node. Collective.

    The ranks rendezvous through a file in a private directory, and by default communicate over the loopback interface.
    """
    assert world.num_nodes == 1, "the loopback interface ends at the node"
    store = world.gather_objects(tempfile.mkdtemp(prefix="odc_mpi-gloo-") if world.rank == 0 else "")[0]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with world.deadline("setting up gloo"):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}/store",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )
    # All ranks are connected and no longer need the file. Remove it now: a killed job would leave it behind.
    world.gather_objects(None)
    if world.rank == 0:
        shutil.rmtree(store, ignore_errors=True)
    yield
    with world.deadline("closing gloo"):
        dist.destroy_process_group()


def dummy_microbatches(minibatch: PlannedMinibatch) -> Iterator[Microbatch]:
    """Yield the dummy microbatches that this rank needs to run as many microbatches as the rank with the most.

    Each dummy consists of the shortest sequence in the minibatch. Its loss and gradients must be ignored.
    """
    counts = [sum(map(bool, microbatches)) for microbatches in minibatch.plan.microbatches]
    shortest = int(minibatch.dataset.lengths[minibatch.indices].argmin())
    for _ in range(max(counts) - counts[minibatch.rank]):
        yield read_microbatch(minibatch.dataset, minibatch.indices[shortest : shortest + 1])


def run_microbatches(
    token_logps: TokenLogps,
    minibatch: PlannedMinibatch,
    microbatches: Iterable[Microbatch],
    factor: float = 1.0,
    device: torch.device = HOST,
) -> torch.Tensor:
    """Run the forward and backward passes of microbatches, and return their contribution to the minibatch's loss.

    The result is a float64 scalar on `device`, which a GPU may not have computed yet. Gradients, but not the result,
    are multiplied by `factor`. If the model is sharded, both passes communicate.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for microbatch in microbatches:
        moved = microbatch.to(device)
        loss = -token_logps(moved.inputs, moved.logit_positions, moved.targets).logps.sum() / minibatch.num_tokens
        (loss * factor).backward()
        total += loss.detach()
    return total
