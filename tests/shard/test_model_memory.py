"""Memory of unsharded parameters on a rank, and the number of fetches."""

import pytest
import torch
from parity import Train, squares
from ranks import RecordingTransport, on_ranks, run_ranks
from torch import nn
from toy_models import INPUT, WIDTH, Layer, Stack

NUM_LAYERS = 12
LAYERS = [f"layers.{i}" for i in range(NUM_LAYERS)]


@pytest.fixture
def module() -> nn.Module:
    return Stack(NUM_LAYERS).double()


@pytest.mark.parametrize(("size", "checkpointing"), [(1, False), (2, False), (1, True)])
@on_ranks()
def test_fetches_of_a_forward_and_a_backward(
    transport: RecordingTransport, size: int, checkpointing: bool, module: nn.Module
) -> None:
    """Recomputing a layer and going back through it is one use."""
    train = Train(transport, module, activation_checkpointing=checkpointing)
    with train.model.minibatch():
        transport.log.clear()
        loss = squares(train.model, (INPUT,))
        assert transport.names("fetch") == ["(root)", *LAYERS]
        transport.log.clear()
        loss.backward()
        # The last two are still there; then each in reverse order, once.
        assert transport.names("fetch") == LAYERS[-3::-1]
        assert sorted(transport.names("push")) == sorted([*LAYERS, "(root)"])
        if not checkpointing:
            assert transport.names("push") == [*LAYERS[::-1], "(root)"]
        transport.log.clear()
        squares(train.model, (INPUT,)).backward()
        # Those of the last backward's end are this forward's beginning. The root stayed.
        assert transport.names("fetch") == [*LAYERS[2:], *LAYERS[-3::-1]]
        assert sorted(transport.names("push")) == sorted([*LAYERS, "(root)"])


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
        assert train.model.usage.peak_parameter_bytes <= train.shard_bytes + 2 * train.layout_bytes("0")

    run_ranks(2, work)
