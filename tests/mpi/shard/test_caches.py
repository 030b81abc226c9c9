"""Caches of unlike sizes on the ranks, over windows of which each fetch is a copy, against plain torch."""

import copy

import pytest
import torch
from late_device import LateDevice
from torch import nn

from odc_mpi import api, shard_model
from odc_mpi.api import decide_for
from odc_mpi.errors import AllRanksUserError
from odc_mpi.shard.cache_budget import CacheBytes

pytestmark = pytest.mark.mpi

WIDTH, NUM_LAYERS, STEPS = 24, 6, 4
#: Microbatches of a rank by step, of which the last goes to rank 0 alone.
COUNTS = (3, 2, 1)


class Block(nn.Module):
    """A unit."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks, of which a microbatch uses some."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x, used):
        x = self.first(x)
        for index in used:
            x = self.blocks[index](x)
        return x


def microbatches(step, rank):
    """A rank's inputs and the blocks to use; in the second step no rank uses the last block."""
    for i in range(COUNTS[rank] if step < STEPS - 1 else rank == 0):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
        used = [b for b in range(NUM_LAYERS) if (b + i + rank) % 3 and not (step == 1 and b == NUM_LAYERS - 1)]
        yield torch.randn(5, WIDTH, generator=generator), used


def loss_of(module, x, used):
    return module(x.to(next(iter(module.parameters())).dtype), used).float().pow(2).sum()


def train_plain(module, size):
    """Plain torch in bf16 over fp32 masters, gradients summed in fp32, as the runtime has it."""
    masters = {name: nn.Parameter(p.detach().float()) for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(size):
            for x, used in microbatches(step, rank):
                module.zero_grad()
                loss = loss_of(module, x, used)
                loss.backward()
                total += float(loss.detach())
                for name, p in module.named_parameters():
                    if p.grad is not None:
                        grad = masters[name].grad
                        masters[name].grad = p.grad.float() if grad is None else grad + p.grad.float()
        optimizer.step()
        losses.append(total)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(masters[name])
    return losses, {name: p.detach() for name, p in masters.items()}


@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
def test_unlike_caches_change_nothing_but_traffic(world, reduction):
    torch.manual_seed(3)
    module = Net().to(torch.bfloat16)
    wanted_losses, wanted = train_plain(copy.deepcopy(module), world.size)
    unit_bytes = 2 * (WIDTH * WIDTH + 32)
    of_ranks = [CacheBytes(1 << 30, 1 << 30), CacheBytes(2 * unit_bytes, 3 * 2 * unit_bytes), CacheBytes()]
    decision = decide_for(world, zero_copy="off", reduction=reduction, progress="off")
    model = shard_model(
        copy.deepcopy(module),
        world,
        units=[Block],
        decision=decision,
        parameter_cache_bytes=of_ranks[world.rank].parameters,
        gradient_cache_bytes=of_ranks[world.rank].gradients,
    )
    assert model.cache_bytes == of_ranks[world.rank]
    optimizer = torch.optim.AdamW(model.shard_parameters(), lr=0.01, weight_decay=0.1)
    losses, pushed = [], []
    for step in range(STEPS):
        before = model.traffic.pushed
        with model.minibatch("loss") as minibatch:
            own = list(microbatches(step, world.rank))
            for i, (x, used) in enumerate(own):
                if i == len(own) - 1 and world.rank != 1:  # rank 1 does not know, as with tickets
                    model.set_is_last_backward()
                loss = model(x.to(torch.bfloat16), used).float().pow(2).sum()
                loss.backward()
                minibatch.local["loss"] += float(loss.detach())
        pushed.append(model.traffic.pushed - before)
        losses.append(minibatch.sum("loss"))
        last = [p for name, p in model.named_shard_parameters() if name.startswith(f"blocks.{NUM_LAYERS - 1}.")]
        assert all((p.grad is None) == (step == 1) for p in last), "nobody used it, so it has no gradient"
        optimizer.step()
        model.publish()
    assert losses == pytest.approx(wanted_losses, rel=1e-3)
    for interval, own in model.slices():
        expected = wanted[interval.spec.name].flatten()[interval.start : interval.stop]
        torch.testing.assert_close(own, expected, rtol=2e-3, atol=2e-4, msg=lambda m, p=interval: f"{p.spec.name}: {m}")
    if world.rank == 0:
        once = sum(layout.numel - layout.owned(0)[1] for layout in model.layouts) * 4
        assert all(0 < each.total() <= once for each in pushed), "more than once"
    assert model.traffic.fetched.total()
    model.close()


@pytest.mark.parametrize("wrong", ["2G", -1, 0.5])
def test_a_size_that_is_none_on_one_rank_is_refused_on_all(world, wrong):
    size = wrong if world.rank == world.size - 1 else "auto"
    with pytest.raises(AllRanksUserError, match=f"gradient_cache_bytes: expected .*, got {wrong!r}"):
        shard_model(Net(), world, gradient_cache_bytes=size)


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_ranks_share_the_memory_of_a_gpu_with_the_same_uuid(world, monkeypatch, num_gpus):
    """Each rank sees one GPU, as under `srun --gpus-per-task=1`: only the UUID tells if it is the same one."""
    device = LateDevice()
    device.free_bytes = lambda: 12_000
    monkeypatch.setattr(api, "find_device", lambda kind, host_rank: device)
    monkeypatch.setattr(api, "gpu_uuid", lambda host_rank: f"GPU-{world.rank % num_gpus}")
    decision = decide_for(world, zero_copy="off", reduction="accumulate", progress="off")
    model = shard_model(Net(), world, units=[Block], decision=decision, device="cuda")
    assert model.cache_bytes.parameters == 6_000 // (world.size if num_gpus == 1 else 1)
    model.close()
