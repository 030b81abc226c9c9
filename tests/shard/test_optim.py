import copy
import math
from itertools import pairwise

import pytest
import torch
import transformers
from parity import vectors
from ranks import RecordingTransport, on_ranks, run_ranks
from torch import nn, optim
from toy_models import WIDTH, Layer, Stack

from odc_mpi.comm.layout import ALIGNMENT_NUMEL
from odc_mpi.shard.gradient_format import FloatGradients
from odc_mpi.shard.local_shards import ELEMENTWISE, require_elementwise
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.settings import OptimConfig
from odc_mpi.training.update import make_optimizer, schedule_factor


@pytest.fixture
def module() -> nn.Module:
    return Stack(1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "inner products"),
        (optim.Adafactor, "rows and columns"),
        (optim.Muon, "whole matrices"),
        (type("Lamb", (optim.SGD,), {}), "norm of a whole parameter"),
        (type("LARS", (optim.SGD,), {}), "norm of a whole parameter"),
        (type("Mine", (optim.AdamW,), {}), "set `elementwise = True`"),
        (optim.SparseAdam, "not known to be element-wise"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_others_are_refused_with_a_reason(kind: type[optim.Optimizer], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot train sharded parameters.*{reason}"):
        require_elementwise(kind([nn.Parameter(torch.ones(2, 2))]))


def test_all_of_torch_s_elementwise_optimizers_give_the_same_on_slices() -> None:
    """Check `ELEMENTWISE`: a step on the parts of a parameter is a step on the full parameter."""
    for kind in (*ELEMENTWISE, type("Mine", (optim.AdamW,), {"elementwise": True})):
        whole = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        parts = [nn.Parameter(part.clone()) for part in whole.detach().flatten().split([7, 0, 20, 3])]
        optimizers = [kind([whole], lr=0.1), kind(parts, lr=0.1)]
        require_elementwise(optimizers[0])
        for _ in range(4):
            whole.grad = torch.randn_like(whole)
            for part, gradient in zip(parts, whole.grad.flatten().split([7, 0, 20, 3]), strict=True):
                part.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(torch.cat([p.detach() for p in parts]), whole.detach().flatten(), msg=kind.__name__)


def sharded(transport: RecordingTransport, module: nn.Module) -> ShardedModel:
    return ShardedModel(copy.deepcopy(module).double(), transport, units=[Layer])


@on_ranks(4)
def test_an_optimizer_keeps_state_only_of_what_the_rank_owns(transport: RecordingTransport, module: nn.Module) -> None:
    """And it can be created of any parameters on all ranks, here one of each parameter."""
    model, plain = sharded(transport, module), copy.deepcopy(module).double()
    optimizers = [optim.AdamW([p]) for p in model.shard_parameters()]
    inputs = torch.ones(3, WIDTH, dtype=torch.float64)
    with model.minibatch():
        if transport.group.rank == 0:
            model(inputs).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [bool(o.state) for o in optimizers] == [p.numel() > 0 for p in model.shard_parameters()]
    assert not all(o.state for o in optimizers)
    model.publish()
    plain(inputs).sum().backward()
    optim.AdamW(plain.parameters()).step()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, plain.state_dict()[name])


# Clipping


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_is_that_of_torch(size: int, max_norm: float) -> None:
    module = Stack(2).double()
    minibatches = vectors(3, WIDTH, steps=1, microbatches=1)
    plain = copy.deepcopy(module)
    (100 * plain(*minibatches[0][0]).pow(2)).sum().backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    expected = {name: p.grad.flatten() for name, p in plain.named_parameters()}

    def work(transport: RecordingTransport) -> tuple[float, dict[str, torch.Tensor]]:
        model = sharded(transport, module)
        with model.minibatch():
            if transport.group.rank == size - 1:
                (100 * model(*minibatches[0][0]).pow(2)).sum().backward()
        returned = model.clip_grad_norm_(max_norm)
        return returned, {name: p.grad.clone() for name, p in model.named_shard_parameters() if p.grad is not None}

    ranks = run_ranks(size, work)
    assert len({returned for returned, _ in ranks}) == 1
    assert ranks[0][0] == pytest.approx(norm, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(torch.cat([of_rank[name] for _, of_rank in ranks if name in of_rank]), gradient)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
@on_ranks()
def test_gradients_that_clipping_leaves_alone(
    transport: RecordingTransport, size: int, value: float, module: nn.Module
) -> None:
    model = sharded(transport, module)
    with model.minibatch() as minibatch:
        model(torch.ones(1, WIDTH, dtype=torch.float64)).sum().mul(value).backward()
    owned = [p for p in model.shard_parameters() if p.numel()]
    before = [p.grad.clone() for p in owned]
    norm = model.clip_grad_norm_(0.1)
    assert minibatch.finite is math.isfinite(value)
    assert norm == 0.0 if value == 0.0 else not math.isfinite(norm)
    for p, gradient in zip(owned, before, strict=True):
        assert torch.equal(p.grad.nan_to_num(7.0, 8.0, 9.0), gradient.nan_to_num(7.0, 8.0, 9.0))


def test_the_norm_is_added_up_in_fp64() -> None:
    sum_of_squares = FloatGradients(torch.float32).sum_of_squares
    gradients = [torch.full((10_000,), 1e-3), torch.zeros(0), torch.full((3,), 1e20), torch.tensor([-1e20])]
    assert sum_of_squares({0: gradients[:2], 3: gradients[2:]}) == pytest.approx(4e40, rel=1e-6)  # fp32 ends at 3.4e38
    assert sum_of_squares({0: [torch.full((100_000,), 0.1)]}) == pytest.approx(1000.0, rel=1e-7)
    assert sum_of_squares({}) == 0.0 == sum_of_squares({0: [torch.zeros(0)]})


# Settings


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_schedules(kind: str) -> None:
    [expected] = transformers.get_scheduler(kind, optim.SGD([nn.Parameter(torch.ones(1))]), 0, 20).lr_lambdas
    falling = [schedule_factor(kind, step, 0, 20) for step in range(22)]
    assert falling == pytest.approx([expected(min(step, 20)) for step in range(22)], abs=1e-12)
    for warmup_steps in (1, 4):
        rising = [(step + 1) / (warmup_steps + 1) for step in range(warmup_steps)]
        found = [schedule_factor(kind, step, warmup_steps, warmup_steps + 20) for step in range(warmup_steps + 22)]
        assert found == rising + falling
    assert schedule_factor(kind, 10, 10, 10) == 1.0


def test_the_floor_and_the_stable_phase() -> None:
    assert [schedule_factor(kind, 10, 2, 10, 0.1) for kind in ("cosine", "linear")] == pytest.approx([0.1, 0.1])
    assert schedule_factor("cosine", 6, 2, 10, 0.1) == pytest.approx(0.55)
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = transformers.get_wsd_schedule(optimizer, 0, num_decay_steps=5, num_training_steps=20, min_lr_ratio=0.2)
    [expected] = schedule.lr_lambdas
    found = [schedule_factor("warmup_stable_decay", step, 0, 20, 0.2, 0.25) for step in range(22)]
    assert found == pytest.approx([expected(step) for step in range(22)]) and found[:16] == [1.0] * 16


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_cut_at_a_multiple_of_the_alignment_changes_no_bit(kind: str, threads: int) -> None:
    """Shards begin there, so that only elements at the end of a parameter are outside of a kernel's vectors."""
    numel, config = 200_003, OptimConfig(kind, 1e-2, weight_decay=0.1, adam_beta2=0.99, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(numel, generator=generator)
    gradients = [torch.randn(numel, generator=generator) for _ in range(4)]

    def trained(*cuts: int) -> torch.Tensor:
        bounds = list(pairwise([0, *(cut * ALIGNMENT_NUMEL for cut in cuts), numel]))
        # Slices of one storage, as those of a shard.
        slices = [nn.Parameter(start.clone()[first:last]) for first, last in bounds]
        named = [(f"p{i}", p) for i, p in enumerate(slices)]
        shapes = {name: (1, 1) for name, _ in named}
        optimizer = make_optimizer(config, named, shapes, fused=True)
        assert optimizer.param_groups[0]["fused"]
        for gradient in gradients:
            for parameter, (first, last) in zip(slices, bounds, strict=True):
                parameter.grad = gradient[first:last].mul(0.37)
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in slices])

    torch.set_num_threads(threads)
    whole = trained()
    for cuts in ((1,), (2, 3), (6249, 6250), (1000, 2001, 4003), (3125,)):
        assert torch.equal(trained(*cuts), whole)
