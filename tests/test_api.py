"""Decisions of `shard_model` that need no ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from odc_mpi import api
from odc_mpi.comm.settings import CommConfig


@pytest.mark.parametrize(("num_ranks", "num_copies"), [(2, 1), (4, 2)], ids=["one island", "with others"])
def test_a_node_cache_leaves_room_for_ranks_of_other_islands_on_its_node(monkeypatch, num_ranks, num_copies):
    """Two ranks of an island of three: a copy of the model, and shards of parameters and gradients."""
    module, island = nn.Linear(300, 100, bias=False), SimpleNamespace(local_size=2, size=3)
    model_bytes, shard_bytes = 120_000, 2 * 40_000
    monkeypatch.setattr(api, "available_bytes", lambda: 1 << 30)
    for missing in (0, 1):
        room = num_copies * model_bytes + num_ranks * shard_bytes - missing
        monkeypatch.setattr(api, "free_shm_bytes", lambda room=room: room)
        node = SimpleNamespace(local_size=num_ranks)
        fits = api._fits_node_cache(node, island, module, None, torch.float32, CommConfig(), model_bytes)
        assert fits is not bool(missing)


def test_frozen_parameters_take_at_most_half_of_shared_memory(monkeypatch):
    monkeypatch.setattr(api, "available_bytes", lambda: 1 << 30)
    for room, fits in ((None, True), (2000, True), (1998, False)):
        monkeypatch.setattr(api, "free_shm_bytes", lambda room=room: room)
        assert api.frozen_fit_on_node(1000, 2, CommConfig(parameter_cache_bytes=0)) is fits
    assert not api.frozen_fit_on_node(1 << 30, 2, CommConfig())
