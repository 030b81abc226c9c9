"""Models that come and go: what the process keeps of them."""

import gc
import threading
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.tickets import Tickets
from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]


@pytest.fixture
def decision(world):
    return decide_for(world, CommConfig(zero_copy="off", reduction="accumulate", progress="off"))


def kept(world):
    """Count live resources, also of other tests: their garbage may be collected at any time, so counts may fall."""
    return {
        "resources": len(world._resources),
        "hooks": len(hooks),
        "threads": threading.active_count(),
        "models": world.job.num_models,
    }


def assert_no_more(world, before):
    now = kept(world)
    assert all(now[what] <= count for what, count in before.items()), (now, before)


def step_once(model):
    optimizer = torch.optim.SGD(model.shard_parameters(), lr=0.1)
    with model.minibatch():
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.publish()
    return optimizer


def test_nothing_stays_of_models_that_are_closed(world, decision):
    before, references = kept(world), []
    for _ in range(50):
        model = shard_model(torch.nn.Linear(2, 2), world, comm=decision)
        step_once(model)
        references.append(weakref.ref(model))
        model.close()
        model.close()
        assert_no_more(world, before)
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_parameter_that_is_kept_outlives_its_model(world):
    """With zero-copy it lies in the window's memory, which is gone then."""
    model, seen = shard_model(torch.nn.Linear(64, 64), world), []
    model.module.register_forward_hook(lambda module, inputs, output: seen.append(module.weight.detach()))
    with model.minibatch():
        model(torch.ones(1, 64)).sum().backward()
    (whole,) = seen
    part, before = whole[3:5].view(torch.int32), whole.clone()
    model.close()
    assert torch.equal(whole, before) and torch.equal(part, before[3:5].view(torch.int32))
    whole.zero_()
    assert not part.any()


def test_models_that_were_not_closed_are_named_when_memory_runs_out(world, decision, monkeypatch):
    model = shard_model(torch.nn.Linear(2, 2), world, comm=decision)
    monkeypatch.setattr("odc_mpi.runtime.memory.available_bytes", lambda: 0)
    words = r"this node has 0 MiB .* windows \(beside those of \d+ other models, which close\(\) frees\) of its"
    with pytest.raises(AllRanksUserError, match=words):
        shard_model(torch.nn.Linear(200, 2000), world, comm=decision)
    model.close()


def test_nothing_stays_of_tickets_and_parts_that_are_closed(world):
    before = kept(world)
    Tickets(world).close()
    world.split("node").close()
    world.split("self").close()
    assert_no_more(world, before)


def test_open_resources_close_with_their_world(world, decision):
    before = world.job.num_models
    with world.split("node") as part:
        model = shard_model(torch.nn.Linear(2, 2), part, comm=decision)
        slices = model.shard_parameters()
        step_once(model)
        values = [p.tolist() for p in slices]
        assert part.job.num_models == world.job.num_models > before
        inner = part.split("self")
    assert world.job.num_models == before and [p.tolist() for p in slices] == values
    assert inner._closed
    with pytest.raises(RuntimeError, match=r"parameters were used after close\(\)"):
        model(torch.ones(1, 2))


def unequal_module(rank, difference):
    """A module of which rank 0 has another one than the last rank of two."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3 + rank * (difference == "shape")), torch.nn.ReLU())
    module.register_buffer("seen", torch.zeros(1 + rank * (difference == "buffer")))
    if rank == 0 and difference == "freeze":
        module[0].weight.requires_grad_(False)
    elif rank == 0 and difference == "parameter":
        module.append(torch.nn.Linear(3, 1, bias=False))
    elif rank == 0 and difference == "dtype":
        module.bfloat16()
    return module


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("difference", "found"),
    [
        ("freeze", r"0.weight \(3, 2\) float32 trainable in unit 0, rank 0 has .* frozen in unit 0"),
        ("shape", r"0.weight \(4, 2\) float32 .*, rank 0 has 0.weight \(3, 2\) float32 .*"),
        ("dtype", r"0.weight \(3, 2\) float32 .*, rank 0 has 0.weight \(3, 2\) bfloat16 .*"),
        ("parameter", r"seen \(1,\) float32, rank 0 has 2.weight \(1, 3\) float32 trainable in unit 2"),
        ("buffer", r"seen \(2,\) float32, rank 0 has seen \(1,\) float32"),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_all(world, decision, difference, found):
    before = kept(world)
    with pytest.raises(AllRanksUserError, match=f"^the model differs between ranks: rank 1 has {found}$"):
        shard_model(unequal_module(world.rank, difference), world, units=[torch.nn.Linear], comm=decision)
    assert_no_more(world, before)
