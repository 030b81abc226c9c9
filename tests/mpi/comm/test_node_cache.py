"""Ranks of a node fetch an array once and never see an old one, on two pretended nodes, of two ranks and the others."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from late_device import LateDevice
from pretended_nodes import on_pretended_nodes
from torch import nn
from units import Block, assert_fetched, assert_sums, write_parameters

from odc_mpi import shard_model
from odc_mpi.comm.factory import staged, window_transport
from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes(3, 4)]

SIZES = [1, 33, 70_000, 1000]
ROUNDS = 8


@pytest.fixture(scope="module")
def nodes(world):
    return on_pretended_nodes(world)


#: With less room than the gradient of a unit needs.
SMALL_MAILBOX = {"reduction": "mailbox", "mailbox_bytes": 256 * 3}


def test_a_node_fetches_each_array_once_and_reads_what_was_published(nodes, allocate):
    """All ranks want all arrays at once, each in an order of its own. One is slow, also to end with a publication."""
    transport = allocate(window_transport(nodes, comm=CommConfig(progress="thread")), SIZES)
    parameters = transport.parameters
    assert parameters.transfers and parameters.stays_valid == (nodes.local_size == 2)
    for number in range(ROUNDS):
        values = [torch.full((numel,), 10.0 * number + index) for index, numel in enumerate(SIZES)]
        write_parameters(transport, values)
        time.sleep(0.02 * (nodes.rank == 1))
        for index in random.Random(100 * number + nodes.rank).sample(range(len(SIZES)), len(SIZES)):
            assert_fetched(transport, values, [index, index])
        time.sleep(0.02 * (nodes.rank == 1))
        transport.complete_gradients(np.zeros(1))
    fetches = nodes.gather_objects((nodes.node, len(transport.storages[0].traffic.moved)))
    assert sum(count for node, count in fetches if node == nodes.node) == ROUNDS * len(SIZES) * (3 - nodes.local_size)


def test_a_rank_that_waits_for_its_node_adds_gradients_meanwhile(nodes, allocate):
    """Without a progress thread. The rank that fetches completes its fetch after a push, which needs the others."""
    transport = allocate(window_transport(nodes, comm=CommConfig(**SMALL_MAILBOX)), SIZES)
    parameters, gradient = transport.parameters, torch.ones(1000)
    if nodes.rank == 1:
        fetch = parameters.fetch(3)
    nodes.gather_objects(None)
    if nodes.rank == 0:
        assert not parameters.fetch(3).wait().any()
        assert not any(transport.take_traffic())
    if nodes.rank == 1:
        transport.gradients.push(3, gradient).wait()
        assert not fetch.wait().any()
    transport.complete_gradients(np.zeros(1))
    assert_sums(transport, [*map(torch.zeros, SIZES[:3]), gradient])


@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
@pytest.mark.parametrize("kind", ["window", "staged", "device"])
def test_bytes_are_counted_by_the_node_of_their_owner(nodes, allocate, kind, reduction):
    settings = CommConfig(node_cache="off", progress="thread", reduction=reduction)
    transport = window_transport(nodes, comm=settings, device=LateDevice() if kind == "device" else None)
    transport = allocate(staged(transport, LateDevice()) if kind == "staged" else transport, SIZES)
    parameters, counts = transport.parameters, np.zeros((2, 2))
    for index, layout in enumerate(parameters.layouts):
        parameters.release(parameters.fetch(index).wait())
        gradient, half = transport.gradients.empty(4 * -(-layout.numel // 2)).view(torch.float32), layout.numel // 2
        transport.gradients.prepare_push(gradient.fill_(1.0))
        transport.gradients.push(index, gradient, half).wait()
        for owner in set(range(nodes.size)) - {nodes.rank}:
            start, stop = layout.owned(owner)
            counts[:, int(owner not in nodes.node_ranks)] += 4 * (stop - start), 4 * max(0, stop - max(start, half))
    assert transport.take_traffic() == counts.ravel().tolist()
    assert not any(transport.take_traffic())
    transport.complete_gradients(np.zeros(1))


def test_there_is_no_cache_on_a_single_node(world, allocate):
    transport = allocate(window_transport(world), SIZES)
    assert not transport.parameters.transfers
    assert transport.node_cache is None


def train(nodes, module, prefetch, device=None, **settings):
    """Return the final state, outputs between minibatches, and the bytes that each rank fetched from other nodes.

    Beside these, the bytes of the frozen arrays that ranks of other nodes own.
    """
    transport = window_transport(nodes, reduce_dtype=torch.int64, comm=CommConfig(**settings))
    transport = transport if device is None else staged(transport, device)
    model = ShardedModel(copy.deepcopy(module), transport, units=[Block], prefetch=prefetch)
    model.cache_bytes = CacheBytes(1 << 30, 0)
    optimizer = torch.optim.AdamW(model.shard_parameters(), lr=0.1)
    outputs, moved = [], []
    for step in range(3):
        with model.minibatch() as minibatch:
            # The last rank has nothing to do in some steps, and others have several microbatches.
            for microbatch in range(0 if step == 1 and nodes.rank == nodes.size - 1 else nodes.rank + 1):
                generator = torch.Generator().manual_seed(100 * step + 10 * nodes.rank + microbatch)
                model(torch.randn(3, 16, generator=generator)).square().sum().backward()
        moved.append(int(minibatch.local["bytes_fetched_other_nodes"]))
        optimizer.step()
        model.publish()
        if nodes.rank != 0:
            with torch.no_grad():
                outputs.append(model(torch.ones(1, 16)).clone())
        if nodes.rank == 1:
            with model.unsharded(gradients=False), torch.inference_mode():
                assert torch.equal(model(torch.ones(1, 16)), outputs[-1])
    state = model.state_dict()
    nodes.gather_objects(None)
    far = [rank for rank in range(nodes.size) if rank not in nodes.node_ranks]
    frozen = [layout for layout in model.layouts if not layout.trainable]
    kept = sum(4 * (stop - start) for layout in frozen for start, stop in map(layout.owned, far))
    model.close()
    return state, outputs, moved, kept


@pytest.fixture(scope="module")
def module():
    """With a frozen unit, and one that is frozen in part."""
    torch.manual_seed(1)
    module = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(16, 4))
    module[1].requires_grad_(False)
    module[3].linear.bias.requires_grad_(False)
    return module


@pytest.fixture(scope="module")
def without_cache(nodes, module):
    return train(nodes, module, prefetch=1, progress="thread", node_cache="off")


@pytest.mark.parametrize("progress", ["thread", "off"])
@pytest.mark.parametrize(
    ("prefetch", "device", "settings"),
    [(0, None, {}), (2, None, {}), (2, LateDevice(), {}), (0, None, SMALL_MAILBOX), (2, None, SMALL_MAILBOX)],
    ids=["0", "2", "device", "mailbox 0", "mailbox 2"],
)
def test_training_gives_the_same_bits_and_moves_each_byte_once(
    nodes, module, without_cache, prefetch, device, settings, progress
):
    """Frozen ones once in all. With ranks without a microbatch, and forwards between the minibatches."""
    state, outputs, moved, kept = train(nodes, module, prefetch, device, progress=progress, **settings)
    wanted, wanted_outputs, each, _ = without_cache
    assert all(torch.equal(values, wanted[name]) for name, values in state.items())
    assert all(map(torch.equal, outputs, wanted_outputs))
    everyone = nodes.gather_objects((nodes.node, moved, each, kept))
    for node in range(2):
        moved, each = (np.array([found[i] for found in everyone if found[0] == node]) for i in (1, 2))
        # Without a cache every rank that works in a step, or before it, fetches each unit.
        assert (each.max(axis=0) == each[0].max()).all()
        if len(moved) == 2:
            kept = next(kept for on, *_, kept in everyone if on == node)
            assert kept and (moved.sum(axis=0) == each.max(axis=0) - np.array([0, kept, kept])).all()
        else:
            assert (moved == each).all()


def test_the_setting_of_the_cache_is_checked_and_one_rank_can_turn_it_off(nodes):
    modules = [nn.Sequential(*(Block() for _ in range(2))) for _ in range(2)]
    with pytest.raises(UserError, match='node_cache: expected auto or off, got "on"'):
        CommConfig(node_cache="on")
    for module, setting in zip(modules, ("auto", "off" if nodes.rank == 0 else "auto"), strict=True):
        model = shard_model(module, nodes, units=[Block], comm=CommConfig(node_cache=setting))
        has_cache = module is modules[0] and nodes.local_size == 2
        assert (model.usage.node_cache_bytes > 0) == has_cache
        assert (model.cache_needs.maximum.parameters == 0) == has_cache
        model.close()
