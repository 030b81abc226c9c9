"""Gloo process group, for FSDP2 on CPUs and `bench transport`. No other module initializes `torch.distributed`."""

import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from odc_mpi.runtime.world import World


class Gloo:
    """Process group of all ranks with the gloo backend. All ranks must be on one node. Construction is collective.

    The ranks rendezvous through a file in a private directory, and by default communicate over the loopback interface.
    """

    def __init__(self, world: World) -> None:
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
        self._world = world
        # All ranks are connected and no longer need the file. Remove it now: a killed job would leave it behind.
        world.gather_objects(None)
        if world.rank == 0:
            shutil.rmtree(store, ignore_errors=True)
        # torch 2.13 renamed both functions, and warns about the old names.
        self._all_gather = _first("all_gather_single", "all_gather_into_tensor")
        self._reduce_scatter = _first("reduce_scatter_single", "reduce_scatter_tensor")

    def all_gather(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Gather the shards of all ranks, each `[n]`, into `full`, `[ranks * n]`, in rank order. Collective."""
        with self._world.deadline("gathering with gloo"):
            self._all_gather(full, shard)

    def reduce_scatter(self, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        """Sum `gradient`, `[ranks * n]`, over all ranks, and write this rank's part to `shard`, `[n]`. Collective."""
        with self._world.deadline("reducing with gloo"):
            self._reduce_scatter(shard, gradient)

    def close(self) -> None:
        """Destroy the process group. Collective."""
        with self._world.deadline("closing gloo"):
            dist.destroy_process_group()


def _first(*names: str) -> Callable[..., Any]:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
