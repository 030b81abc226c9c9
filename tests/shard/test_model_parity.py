"""A sharded module is trained as the plain one: losses and parameters after several steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Batch, Loss, check_parity, next_tokens, sgd, squares, tokens, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_models import VOCABULARY, WIDTH, Block, Layer, Stack, Transformer

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
#: Every size, half of them with recomputation, as arguments of `check_parity`.
MODES = pytest.mark.parametrize(
    "mode",
    [{"size": size, "activation_checkpointing": size in (1, 3)} for size in (1, 2, 3, 4)],
    ids=["1r", "2", "3r", "4"],
)
#: How many units are fetched ahead, in a thread.
PREFETCH = pytest.mark.parametrize("prefetch", [0, 1, 2], ids="ahead{}".format)


@MODES
@PREFETCH
@pytest.mark.parametrize(
    "units",
    [[], [Block], [Block, nn.Linear], [Block, nn.Sequential], [nn.Embedding, nn.Linear, nn.LayerNorm], [nn.LayerNorm]],
    ids=["root", "blocks", "nested", "sequential", "leaves", "norms"],
)
def test_whatever_the_units(mode: dict[str, Any], units: list[type], prefetch: int) -> None:
    """With SGD, because Adam's steps do not depend on the scale of gradients."""
    options = {"loss": next_tokens, "make_optimizer": sgd, "max_norm": None} | mode
    check_parity(Transformer(tied=True), tokens(VOCABULARY), units=units, prefetch=prefetch, **options)


class Branches(nn.Module):
    """Calls its layers any number of times, in any order."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: torch.Tensor, calls: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for i in calls:
            x = self.layers[i](x)
        return x


def calling(*per_microbatch: tuple[int, ...]) -> list[list[Batch]]:
    return [[(torch.randn(4, WIDTH, dtype=torch.float64), calls) for calls in per_microbatch] for _ in range(3)]


@MODES
@PREFETCH
@pytest.mark.parametrize(
    "calls",
    [
        [(0, 1, 2)] * 3,
        [(0, 0, 1, 2), (0, 1, 0, 2), (1, 1, 1, 0)],  # one twice or three times in a forward
        [(0,), (1,), (2,)],  # each by one rank only
        [(0, 1), (1, 0), (0, 1)],  # one by no rank
        [(), (), ()],  # all by no rank
        [(2, 1, 0), (), (1, 2, 1)],
    ],
    ids=["all", "repeated", "one_rank", "never", "none", "mixed"],
)
def test_units_called_more_than_once_or_never(
    mode: dict[str, Any], calls: list[tuple[int, ...]], prefetch: int
) -> None:
    check_parity(Branches(), calling(*calls), units=[Layer], prefetch=prefetch, **mode)


class Choosy(nn.Module):
    """Uses one of two inner modules, depending on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.yes(x) if x[0, 0] > 0 else self.no(x))


class Outside(nn.Module):
    """Reads a parameter of a unit without calling it."""

    def __init__(self, as_well_call_it: bool) -> None:
        super().__init__()
        self.layer, self.last = Layer(), nn.Linear(WIDTH, WIDTH)
        self.call = as_well_call_it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.layer.linear.weight) * self.layer.linear.weight[0]
        x = self.layer(x) if self.call else x
        return self.last(x) + self.layer.linear.weight.sum() + self.layer.linear.bias


@SIZES
@pytest.mark.parametrize("call", [False, True])
def test_parameters_used_by_another_module(size: int, call: bool) -> None:
    check_parity(Outside(call), vectors(4, WIDTH), size, units=[Layer])


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), nn.Linear(WIDTH, WIDTH)
        self.c = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


# Frozen parameters


def freeze(module: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
    return module


@MODES
@PREFETCH
@pytest.mark.parametrize(
    "frozen",
    [
        ("layers.1",),
        ("first", "layers.0"),  # nothing before the first trained unit needs a gradient
        ("last", "layers.2"),
        ("layers.0.linear.bias", "layers.2.linear.weight"),
        ("first.weight", "last.bias"),
        ("layers", "first", "last.weight"),
    ],
    ids=",".join,
)
def test_frozen_parameters(mode: dict[str, Any], frozen: tuple[str, ...], prefetch: int) -> None:
    module = freeze(Stack(3), *frozen)
    before = {name: p.double().clone() for name, p in module.named_parameters() if name.startswith(frozen)}
    ranks = check_parity(module, vectors(4, WIDTH), units=[Layer], prefetch=prefetch, **mode)
    # One push per unit and backward; none for a unit that is wholly frozen.
    trained = {(name.rpartition(".linear")[0] or "(root)") for name, p in module.named_parameters() if p.requires_grad}
    for rank in ranks:
        assert all(torch.equal(rank.state[name], value) for name, value in before.items())
        named = {name for name, _ in rank.model.named_shard_parameters()}
        assert named == {name for name, p in module.named_parameters() if p.requires_grad}
        pushed = rank.transport.names("push")
        assert set(pushed) <= trained
        assert len(pushed) == len(rank.losses) * len(trained)
    assert {name for rank in ranks for name in rank.transport.names("push")} == trained


# Modules of torch's own


class Image(nn.Module):
    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **settings)
        self.last = nn.LazyLinear(3)
        self(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x))[0])


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Scaled(nn.Module):
    """Has parameters of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self.scale + self.shift, x @ self.empty.T], -1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.linear(x).add_(0.1), 0.0, training=True, inplace=True).relu_()
        return self.other(y).mul_(2.0).sigmoid_()


class Expanded(nn.Module):
    """Its parameters' gradients come expanded, transposed and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.cube = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias.sum() + self.cube.permute(2, 0, 1).reshape(8, 3).sum(0)


def weight_normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*(nn.utils.parametrizations.weight_norm(layer) for layer in layers))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Keywords(nn.Module):
    """Its arguments are called as those of `torch.utils.checkpoint.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor, *, debug: float = 1.0, preserve_rng_state: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x) * debug)
        return y if preserve_rng_state is None else y * preserve_rng_state


class WithKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = linear(), Keywords()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.layer(self.layer(y, debug=3.0), preserve_rng_state=y)


class Mixed(nn.Module):
    """The same parameters, without a graph and with one, in one call of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.linear(x).abs().amax() + 1.0
        with torch.inference_mode():
            self.linear(x)
        return torch.tanh(self.linear(x) / scale)


class Rotate(nn.Module):
    """Uses a conjugated and a negated view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turn = linear(), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.view_as_complex(self.turn).conj()
        y = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)) * turn.imag[:, None])
        return torch.view_as_real(y * turn).flatten(-2)


TOY_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[Any]]] = {
    "conv": (Image, (2, 2, 5, 5), [nn.Conv2d, nn.BatchNorm2d]),
    "channels_last": (lambda: Image(channels_last=True), (2, 2, 5, 5), [nn.Conv2d]),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), (2, 5, WIDTH), [nn.LSTM]),
    "lstm_in_root": (lambda: Recurrent(nn.LSTM, bidirectional=True), (2, 5, WIDTH), []),
    "lstm_in_unit": (lambda: nn.Sequential(Recurrent(nn.LSTM)), (2, 5, WIDTH), [Recurrent]),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), (2, 5, WIDTH), [nn.GRU, nn.Linear]),
    "rnn": (lambda: Recurrent(nn.RNN, bias=False), (2, 5, WIDTH), [nn.RNN]),
    "attention_by_parts": (SelfAttention, (2, 5, WIDTH), [nn.Linear]),
    # Also recomputed it sees that its three arguments are one.
    "attention": (SelfAttention, (2, 5, WIDTH), [nn.MultiheadAttention]),
    "encoder_layer": (
        lambda: nn.Sequential(
            linear(), *(nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True) for _ in range(3))
        ),
        (2, 5, WIDTH),
        [nn.TransformerEncoderLayer],
    ),
    "scalars": (lambda: nn.Sequential(linear(), Scaled(), linear()), (4, WIDTH), [Scaled]),
    "in_place": (lambda: nn.Sequential(InPlace(), InPlace()), (4, WIDTH), [InPlace]),
    "expanded": (lambda: nn.Sequential(linear(), Expanded()), (4, WIDTH), [Expanded]),
    "bilinear": (lambda: nn.Sequential(linear(), Layer(), nn.PReLU(), nn.GroupNorm(2, WIDTH)), (4, WIDTH), [nn.PReLU]),
    "weight_norm": (lambda: weight_normed(linear(), linear()), (4, WIDTH), []),
    "weight_norm_units": (lambda: weight_normed(linear(), linear()), (4, WIDTH), [nn.Linear]),
    "two_names_in_root": (SharedLayer, (4, WIDTH), []),
    "two_names": (SharedLayer, (4, WIDTH), [Layer]),
    "two_names_around_a_unit": (SharedLayer, (4, WIDTH), [nn.Linear]),
    "keywords": (WithKeywords, (4, WIDTH), [Keywords]),
    "without_a_graph_before": (lambda: nn.Sequential(linear(), Mixed(), Mixed()), (4, WIDTH), [Mixed]),
    "conjugated": (lambda: nn.Sequential(Rotate(), linear()), (3, WIDTH), [Rotate]),
}


@pytest.mark.parametrize(
    ("size", "activation_checkpointing"), [(1, False), (2, True), (3, False)], ids=["1", "2r", "3"]
)
@pytest.mark.parametrize("name", TOY_MODULES)
def test_zoo(name: str, size: int, activation_checkpointing: bool) -> None:
    make, shape, units = TOY_MODULES[name]
    # Recomputing a BatchNorm counts its input twice, with plain torch too.
    with_buffers = size == 1 and not activation_checkpointing
    check_parity(
        make(),
        vectors(*shape),
        size,
        units=units,
        with_buffers=with_buffers,
        activation_checkpointing=activation_checkpointing,
    )


def test_spectral_norm_on_one_rank() -> None:
    """Its forward changes buffers that the next forward uses: the copies of several ranks go their own ways."""
    module = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(linear()) for _ in range(2)))
    check_parity(module, vectors(4, WIDTH), 1, units=[nn.Linear], with_buffers=True)


# Ways to use a model


class InsideLayer(Layer):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(self.linear(y)).sin(), x, use_reentrant=self.use_reentrant).cos()


class Checkpointed(nn.Module):
    """Checkpoints as users do: inside or around every unit, or around all of them."""

    def __init__(self, where: str, use_reentrant: bool) -> None:
        super().__init__()
        self.stack = Stack(3)
        if where == "inside":
            self.stack.layers = nn.ModuleList(InsideLayer(use_reentrant) for _ in range(3))
        self.where, self.use_reentrant = where, use_reentrant

    def recompute(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "all":
            return self.recompute(self.stack, x)
        x = self.stack.first(x)
        for layer in self.stack.layers:
            x = self.recompute(layer, x) if self.where == "around" else layer(x)
        return self.stack.last(x)


@MODES
@PREFETCH
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("where", ["inside", "around", "all"])
def test_users_checkpoint_around_units(mode: dict[str, Any], use_reentrant: bool, where: str, prefetch: int) -> None:
    minibatches = [[(batch[0].requires_grad_(),) for batch in minibatch] for minibatch in vectors(4, WIDTH)]
    check_parity(Checkpointed(where, use_reentrant), minibatches, units=[Layer], prefetch=prefetch, **mode)


def contrasted(model: Any, batch: Batch) -> torch.Tensor:
    a, b = model(batch[0]), model(batch[0].flip(0))
    return (a * b).mean() + (a - b).pow(2).mean()


def two_backwards(model: Any, batch: Batch) -> torch.Tensor:
    loss = squares(model, batch)
    loss.backward(retain_graph=True)
    return loss


def input_gradient(model: Any, batch: Batch) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    (squares(model, (x,))).backward()
    assert x.grad is not None
    return squares(model, (batch[0] - x.grad,))


def gradient_penalty(model: Any, batch: Batch) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    loss = squares(model, (x,))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (gradient.norm() - 1.0).square()


def mixed_precision(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squares(model, batch)


@MODES
@PREFETCH
@pytest.mark.parametrize(
    "loss",
    [contrasted, two_backwards, input_gradient],
    ids=lambda loss: loss.__name__,
)
def test_ways_to_use_a_model(mode: dict[str, Any], loss: Loss, prefetch: int) -> None:
    check_parity(Stack(4), vectors(4, WIDTH), units=[Layer], loss=loss, prefetch=prefetch, **mode)


@SIZES
def test_a_gradient_of_a_gradient(size: int) -> None:
    check_parity(Stack(4), vectors(4, WIDTH), size, units=[Layer], loss=gradient_penalty)


@pytest.mark.parametrize("size", [1, 2])
def test_autocast(size: int) -> None:
    check_parity(
        Stack(2),
        vectors(4, WIDTH, dtype=torch.float32),
        size,
        units=[Layer],
        loss=mixed_precision,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        make_optimizer=sgd,
        tolerance=1e-4,
    )


def evaluated_before(model: Any, batch: Batch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs = [model(*batch)]
    with torch.inference_mode():
        outputs.append(model(*batch))
    model.train()
    loss = squares(model, batch)
    for output in outputs:  # without dropout, training mode has the same outputs
        torch.testing.assert_close(output.pow(2).mean(), loss.detach())
    return loss


@MODES
@PREFETCH
def test_evaluation_between_steps(mode: dict[str, Any], prefetch: int) -> None:
    """Under no_grad and inference_mode, where torch takes its fast path through an encoder layer."""
    module = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True) for _ in range(3)))
    units = [nn.TransformerEncoderLayer]
    check_parity(module, vectors(2, 5, WIDTH), units=units, loss=evaluated_before, prefetch=prefetch, **mode)


class SparseEmbedding(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@SIZES
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("units", [[], [nn.Embedding, Layer]], ids=["root", "units"])
def test_sparse_gradients(size: int, tied: bool, units: list[type]) -> None:
    check_parity(SparseEmbedding(tied), tokens(VOCABULARY), size, loss=next_tokens, units=units)


@SIZES
def test_a_minibatch_of_nothing(size: int) -> None:
    minibatches = vectors(3, WIDTH, steps=4)
    minibatches[1] = []
    check_parity(Stack(2), minibatches, size, units=[Layer])
