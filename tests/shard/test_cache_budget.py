"""Resident units and local gradient accumulation: the rule, and results that do not depend on it."""

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from adversary import Adversary, PoisonedPool
from parity import ITEM_BYTES, Batch, Train, adamw, check_parity, sgd, squares, vectors
from ranks import RecordingTransport, on_ranks, run_ranks
from test_model_parity import Branches, Choosy, calling, freeze
from torch import nn
from toy_models import INPUT, WIDTH, Layer, Stack

from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.shard.autograd import SavedTensorHooks
from odc_mpi.shard.cache_budget import CacheBudget, CacheBytes, auto_cache_bytes
from odc_mpi.shard.model import ShardedModel

NUM_LAYERS = 12
#: Bytes of a layer, padding between its weight and its bias included.
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * ITEM_BYTES
PLENTY = CacheBytes(1 << 30, 1 << 30)


def forward_and_backward(num_units: int, num_microbatches: int) -> list[int]:
    there = list(range(num_units))
    return (there + there[::-1]) * num_microbatches


def fetches(uses: Iterable[int], num_staying: int, num_in_use: int = 2) -> int:
    """Return the fetches of equal units: the first ones stay resident, of the others the least recent is dropped."""
    cache, in_use, count = CacheBudget(num_staying), dict[int, None](), 0
    for unit in uses:
        if unit in cache:
            continue
        if unit not in in_use:
            count += 1
            if cache.admit(unit, 1):
                continue
            if len(in_use) == num_in_use:
                del in_use[next(iter(in_use))]
        in_use.pop(unit, None)
        in_use[unit] = None
    return count


@pytest.fixture
def module() -> nn.Module:
    return Stack(NUM_LAYERS).double()


def test_a_budget() -> None:
    cache = CacheBudget(10)
    assert cache.admit("a", 4) and cache.admit("b", 6) and not cache.admit("c", 1)
    assert cache.admit("a", 4) and cache.admitted_bytes == 10
    cache.discard("a")
    cache.discard("c")
    assert "a" not in cache and "b" in cache and cache.fits(4) and not cache.fits(5)
    assert not CacheBudget().admit("a", 1)


def test_free_memory_is_shared_out() -> None:
    needs = CacheBytes(parameters=100, gradients=200)
    assert auto_cache_bytes(4000, 4, needs, CommConfig()) == needs
    assert auto_cache_bytes(1000, 4, needs, CommConfig()) == CacheBytes(100, 25)
    assert auto_cache_bytes(400, 4, needs, CommConfig()) == CacheBytes(50, 0)
    assert auto_cache_bytes(-5, 4, needs, CommConfig()) == CacheBytes(0, 0)
    assert auto_cache_bytes(1000, 4, needs, CommConfig(gradient_cache_bytes=70)) == CacheBytes(55, 70)
    assert auto_cache_bytes(1000, 4, needs, CommConfig(parameter_cache_bytes=7)) == CacheBytes(7, 118)
    both = CommConfig(parameter_cache_bytes=7, gradient_cache_bytes=8)
    assert auto_cache_bytes(0, 4, needs, both) == CacheBytes(7, 8)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoisonedPool, "poisons_all", True)


#: Budgets of a rank: none, half of the layers, all, and ranks that differ.
BUDGETS = {
    "half": lambda rank: CacheBytes(NUM_LAYERS // 2 * LAYER_BYTES, NUM_LAYERS // 2 * LAYER_BYTES),
    "all": lambda rank: PLENTY,
    "unlike": lambda rank: (CacheBytes(), PLENTY, CacheBytes(2 * LAYER_BYTES, 3 * LAYER_BYTES))[rank % 3],
}


def cases() -> Iterable[Any]:
    skipped = calling((0, 1, 2), (0, 2, 2), (1, 0), (0, 0, 1), (), (2, 1))
    frozen = ("layers.1", "layers.3.linear.bias", "first")
    many = vectors(4, WIDTH, microbatches=7)
    yield pytest.param(Stack(5), many, {}, id="plain")
    yield pytest.param(Stack(5), many, {"mark_last": True, "make_optimizer": sgd, "max_norm": None}, id="last_marked")
    yield pytest.param(Stack(5), many, {"prefetch": 1, "mark_last": True}, id="ahead1")
    yield pytest.param(Stack(5), many, {"prefetch": 2, "activation_checkpointing": True}, id="ahead2_recomputed")
    yield pytest.param(Branches(), skipped, {"prefetch": 1}, id="skipped_and_twice")
    yield pytest.param(
        Branches(), skipped, {"mark_last": True, "activation_checkpointing": True}, id="twice_recomputed"
    )
    yield pytest.param(nn.Sequential(*(Choosy() for _ in range(3))), many, {"units": [Choosy]}, id="parts_of_units")
    yield pytest.param(freeze(Stack(5), *frozen), many, {"prefetch": 1, "mark_last": True}, id="frozen")
    narrow = {"param_dtype": torch.float32, "reduce_dtype": torch.float32, "tolerance": 1e-5}
    many = vectors(4, WIDTH, microbatches=7, dtype=torch.float32)
    yield pytest.param(Stack(5), many, {"prefetch": 1, "mark_last": True, **narrow}, id="fp32")


@pytest.mark.parametrize(("plain", "minibatches", "options"), list(cases()))
@pytest.mark.parametrize("budgets", BUDGETS)
def test_equal_to_plain_torch(
    plain: nn.Module, minibatches: list[list[Batch]], options: dict[str, Any], budgets: str
) -> None:
    """Over a transport in which a released unit is NaN, and so is a pushed sum."""
    options = {"units": [Layer], "budgets": BUDGETS[budgets], **options}
    check_parity(copy.deepcopy(plain), minibatches, 3, **options)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("staying", "checkpointing"), [(0, False), (0, True), (1, False), (5, True), (10, False), (12, False)]
)
def test_fetches_and_pushes_of_a_minibatch(staying: int, checkpointing: bool, prefetch: int) -> None:
    """Recomputing a layer and going back through it is one use."""
    module = Stack(NUM_LAYERS).double()
    budgets, options = CacheBytes(staying * LAYER_BYTES, staying * LAYER_BYTES), {"prefetch": prefetch}

    def work(transport: RecordingTransport) -> None:
        train = Train(transport, module, budgets, activation_checkpointing=checkpointing, **options)
        for num_microbatches, mark_last in itertools.product((1, 4, 0, 3), (False, True)):
            fetched, pushed = train.step(num_microbatches, mark_last)
            if prefetch and num_microbatches == 1 and not mark_last:
                continue  # it learns the order of the uses
            uses = forward_and_backward(NUM_LAYERS, num_microbatches)
            assert fetched == fetches(uses, staying) + min(1, num_microbatches)  # the root, too
            # Of an array that is added up, one push; the root comes last, and finds no room unless all is kept.
            num_kept = min(staying, NUM_LAYERS) + (staying > NUM_LAYERS)
            assert pushed == (num_microbatches and num_kept + num_microbatches * (NUM_LAYERS + 1 - num_kept))

    run_ranks(2, work, transport=Adversary if prefetch else RecordingTransport)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("budgets", [CacheBytes(), CacheBytes(3 * LAYER_BYTES + 100, 5 * LAYER_BYTES), PLENTY], ids=str)
def test_memory_is_never_above_what_is_granted(budgets: CacheBytes, prefetch: int) -> None:
    """Also with units of many sizes, used in another order each time."""
    sizes = (2, 3, 5, 8, 4, 7)

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, n * WIDTH), nn.Linear(n * WIDTH, WIDTH)) for n in sizes
            )

        def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
            x = self.first(x)
            for i in order:
                x = torch.tanh(self.layers[i](x))
            return self.first(x)

    module = Uneven().double()

    def work(transport: RecordingTransport) -> None:
        options = {"units": (nn.Sequential,), "prefetch": prefetch, "activation_checkpointing": prefetch == 1}
        model = ShardedModel(copy.deepcopy(module), transport, **options)
        model.cache_bytes = budgets
        optimizer = adamw(model.shard_parameters())
        layouts = transport.parameters.layouts
        numels = sorted(layout.numel for layout in layouts)
        shards = sum(layout.shard_numel for layout in layouts) * ITEM_BYTES
        in_use = ITEM_BYTES * (layouts[0].numel + max(2, 1 + prefetch) * numels[-1])
        needs = model.cache_needs.maximum
        assert model.usage.peak_parameter_bytes == shards
        for order in itertools.islice(itertools.permutations(range(len(sizes))), 0, 720, 90):
            with model.minibatch():
                for part in (order, order[:3], order[::-1]):
                    squares(model, (INPUT, part)).backward()
            optimizer.step()
            model.publish()
            model.state_dict()
            with torch.no_grad():
                model(INPUT, order[:3])
            granted = min(budgets.parameters, needs.parameters)
            assert model.usage.peak_parameter_bytes <= shards + in_use + granted
            granted = min(budgets.gradients, needs.gradients)
            assert model.usage.peak_gradient_bytes <= shards + max(2, 1 + prefetch) * ITEM_BYTES * numels[-1] + granted

    run_ranks(2, work, transport=Adversary if prefetch else RecordingTransport)


@pytest.mark.parametrize("staying", [NUM_LAYERS - 3, NUM_LAYERS + 1])
@on_ranks(1)
def test_a_graph_keeps_parameters_once_all_units_are_unsharded(
    transport: RecordingTransport, staying: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking each tensor that a forward saves takes Python's time."""
    packed, pack = [], SavedTensorHooks._pack
    monkeypatch.setattr(SavedTensorHooks, "_pack", lambda *arguments: (packed.append(1), pack(*arguments))[1])
    model = ShardedModel(Stack(NUM_LAYERS).double(), transport, units=(Layer,))
    model.cache_bytes = CacheBytes(staying * LAYER_BYTES)
    for _ in range(2):
        with model.minibatch():
            for number in range(3):
                packed.clear()
                squares(model, (INPUT,)).backward()
                assert bool(packed) == (number == 0 or staying < NUM_LAYERS)
        model.publish()


@on_ranks(2, transport=Adversary)
def test_forwards_alone_use_resident_units_and_keep_them_for_the_next_minibatch(
    transport: RecordingTransport, module: nn.Module
) -> None:
    train = Train(transport, module, PLENTY)
    transport.log.clear()
    with torch.inference_mode():
        outputs = [train.model(INPUT).clone() for _ in range(3)]
    assert len(transport.names("fetch")) == NUM_LAYERS + 1
    fetched, _ = train.step(2)
    assert fetched == 0
    transport.log.clear()
    with torch.no_grad():
        assert not torch.equal(train.model(INPUT), outputs[0]), "kept units outlived their publication"
    assert len(transport.names("fetch")) == NUM_LAYERS + 1


@pytest.mark.parametrize("prefetch", [0, 1])
@on_ranks(2)
def test_a_smaller_budget_frees_memory(transport: RecordingTransport, prefetch: int, module: nn.Module) -> None:
    train = Train(transport, module, PLENTY, prefetch=prefetch)
    train.step(2)
    with torch.no_grad():
        train.model(INPUT)  # stays, for the next minibatch
    pools = transport.parameters.buffers, train.model._pusher.buffers
    assert all(pool._held_bytes >= NUM_LAYERS * LAYER_BYTES for pool in pools)
    train.model.cache_bytes = CacheBytes()
    assert [pool._held_bytes for pool in pools] == [0, 0]
    assert train.step(2)[0] == 1 + NUM_LAYERS + 3 * (NUM_LAYERS - 2)


@on_ranks(2)
def test_sums_leave_one_after_the_other_without_a_thread(transport: RecordingTransport, module: nn.Module) -> None:
    """Each that is on its way may hold memory, such as pinned memory before it goes to the host."""
    train = Train(transport, module, PLENTY)
    on_the_way: list[int] = []
    push = train.model._pusher._store.push
    train.model._pusher._store.push = lambda *given: (on_the_way.append(len(waiting)), push(*given))[1]  # type: ignore
    waiting = train.model._pusher._in_flight
    train.step(2)
    train.step(2, mark_last=True)
    assert len(on_the_way) == 2 * (NUM_LAYERS + 1) and max(on_the_way) == 1


@pytest.mark.parametrize("prefetch", [0, 1])
@on_ranks(2, transport=Adversary)
def test_a_resident_model_fetches_nothing(transport: RecordingTransport, prefetch: int, module: nn.Module) -> None:
    train = Train(transport, module, CacheBytes(), prefetch=prefetch)
    train.step(1)
    wanted = NUM_LAYERS * LAYER_BYTES
    train.model.cache_bytes = CacheBytes(parameters=wanted - 1)
    short = rf"at least {wanted}, .*got {wanted - 1}, which is 1 bytes short"
    with pytest.raises(UserError, match=short), train.model.unsharded():
        pass
    train.model.cache_bytes = CacheBytes(parameters=wanted)
    with torch.no_grad():
        train.model(INPUT)
    with train.model.unsharded(), torch.inference_mode():
        transport.log.clear()
        for _ in range(3):
            train.model(INPUT)
        with train.model.unsharded():
            pass
        assert transport.names("fetch") == []
    train.step(2)
    in_use = ITEM_BYTES * (transport.layouts[0].numel + 2 * transport.layouts[1].numel)
    assert train.model.usage.peak_parameter_bytes <= train.shard_bytes + wanted + in_use


@pytest.mark.parametrize("transfers", [True, False])
@on_ranks(1)
def test_forwards_without_gradients_see_plain_parameters(transport: RecordingTransport, transfers: bool) -> None:
    module = Stack(3).double()
    transport.parameters.transfers = transfers
    train = Train(transport, module, PLENTY)
    model = train.model
    for _ in range(2):
        train.step(1)
        with torch.no_grad():
            wanted = model(INPUT)
        on_demand = {name: layer._parameters for name, layer in model.module.named_modules()}
        with model.unsharded(gradients=False), torch.no_grad():
            found = model(INPUT)
            for layer in model.module.modules():
                assert type(layer._parameters) is dict
                assert all(p.isfinite().all() and not p.requires_grad for p in layer.parameters())
            transport.log.clear()
            with model.unsharded(gradients=False):
                model(INPUT)
            assert type(model.module.get_submodule("")._parameters) is dict, "the inner block has ended"
            assert transport.log == []
        assert torch.equal(found, wanted)
        assert all(layer._parameters is on_demand[name] for name, layer in model.module.named_modules())
    with pytest.raises(RuntimeError, match="leave it first"), model.unsharded(gradients=False):
        model.cache_bytes = PLENTY
    with pytest.raises(RuntimeError, match="was changed in place"), model.unsharded(gradients=False):
        next(layer for layer in model.module.modules() if layer._parameters).weight.zero_()


@on_ranks(1)
def test_where_nothing_is_to_be_gained_nothing_is_kept(transport: RecordingTransport) -> None:
    train = Train(transport, Stack(2).double(), CacheBytes())
    transport.parameters.transfers = False
    assert train.model.cache_needs.maximum.parameters == 0
    train.model.cache_bytes = PLENTY
    assert train.model.cache_bytes == CacheBytes(0, 1 << 30)
    with train.model.unsharded():
        pass


@pytest.mark.parametrize(
    ("budgets", "finite"), [(CacheBytes(), (False, False, False, True)), (PLENTY, (False, True, False, True))]
)
def test_sums_that_may_overflow_are_known_to_all(budgets: CacheBytes, finite: tuple[bool, ...]) -> None:
    """Each gradient is finite. The last one would bring a sum back, or the sums of two ranks are too much."""
    module = nn.Sequential(Layer()).float()

    def work(transport: RecordingTransport) -> None:
        train = Train(transport, module, budgets)
        of_ranks = [((2e38, 2e38, -2e38), ()), ((1e38, -1e38), (1e38,)), ((1e38,), (1e38,)), ((1e30, -1e30), ())]
        for factors, expected in zip(of_ranks, finite, strict=True):
            with train.model.minibatch() as minibatch:
                for factor in factors[transport.group.rank]:
                    weight = dict(train.model.module.named_modules())["0.linear"].bias
                    (weight * factor).sum().backward()
            assert minibatch.finite is expected
            train.model.publish()

    run_ranks(2, work, torch.float32, torch.float32)


@on_ranks(1)
def test_needs_count_each_array_in_its_own_type(transport: RecordingTransport) -> None:
    module = freeze(Stack(2).double(), "layers.0", "layers.1.linear.weight")
    narrow = {name: torch.float32 for name, p in module.named_parameters() if not p.requires_grad}
    model = ShardedModel(copy.deepcopy(module), transport, units=(Layer,), dtypes=narrow)
    needs, (bias, root) = model.cache_needs, (WIDTH, transport.layouts[0].numel)
    assert needs.maximum == CacheBytes(4 * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH * WIDTH + 8 * bias, 8 * (root + bias))
    assert needs.minimum == CacheBytes(4 * (WIDTH * WIDTH + WIDTH), 8 * bias)


@on_ranks(1)
def test_nothing_is_fetched_for_a_backward_that_needs_no_parameters(transport: RecordingTransport) -> None:
    """The gradient of the first layer's weight takes its input, not its weight."""
    module = nn.Sequential(Layer(), Layer(), Layer(), Layer()).double()
    train = Train(transport, module)
    with train.model.minibatch():
        transport.log.clear()
        squares(train.model, (INPUT,)).backward()
        assert transport.names("fetch") == ["0", "1", "2", "3", "1"]


def test_recurrent_modules_keep_none_of_their_weights() -> None:
    class Recurrent(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for rnn in self:
                x = rnn(x)[0]
            return x

    module = Recurrent(*(nn.GRU(WIDTH, WIDTH) for _ in range(5))).double()

    def work(transport: RecordingTransport) -> None:
        train = Train(transport, module, units=[nn.GRU])
        for _ in range(2):
            train.step()
        with torch.no_grad():
            train.model(INPUT)
        assert train.model.usage.peak_parameter_bytes <= train.shard_bytes + 2 * transport.layouts[0].numel * ITEM_BYTES

    run_ranks(2, work)
