"""With collective fetches and pushes, all ranks issue the same ones in the same order, whatever each did before."""

from typing import Any

import pytest
import torch
from ranks import RecordingTransport, on_ranks
from toy_models import WIDTH, Layer, Stack

from odc_mpi.comm.work import Work
from odc_mpi.shard.model import ShardedModel


class InStep(RecordingTransport):
    """Claims to be collective without communicating, so that an error is seen in the log instead of hanging."""

    thread_safe = False
    one_sided = False
    max_in_use = 0

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self.max_in_use = max(self.max_in_use, len(self.buffers._in_use))
        return super().start_fetch(index, buffer)


def stacked(transport: RecordingTransport, **settings: Any) -> ShardedModel:
    module, generator = Stack().double(), torch.Generator().manual_seed(1)  # ranks share torch's own generator
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return ShardedModel(module, transport, units=[Layer], **settings)


def operations(transport: RecordingTransport) -> list[str]:
    return [f"{operation} {name}" for operation, name in transport.log if operation in ("fetch", "push")]


def backward(model: ShardedModel, rows: int) -> None:
    batch = torch.linspace(-1.0, 1.0, rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)
    model(batch).square().mean().backward()


LAYERS = ["layers.0", "layers.1", "layers.2"]
MICROBATCH = [
    *("fetch (root)", *(f"fetch {name}" for name in LAYERS)),
    *(f"{operation} {name}" for name in reversed(LAYERS) for operation in ("fetch", "push")),
    "push (root)",
]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
@on_ranks(2, transport=InStep)
def test_each_microbatch_fetches_the_same(transport: InStep, prefetch: int, activation_checkpointing: bool) -> None:
    model = stacked(transport, prefetch=prefetch, activation_checkpointing=activation_checkpointing)
    transport.log.clear()
    for _ in range(2):
        with model.minibatch():
            for i in range(3):
                backward(model, rows=1 + transport.group.rank + i)
        model.publish()
    assert operations(transport) == MICROBATCH * 6
    assert transport.max_in_use == 2, "more was held than the root and one unit"
    model.close()


@on_ranks(3, transport=InStep)
def test_calls_of_a_rank_in_between_make_no_difference_later(transport: RecordingTransport) -> None:
    model = stacked(transport)
    with torch.no_grad():
        model.module.layers[transport.group.rank](torch.zeros(1, WIDTH).double())
    transport.log.clear()
    with model.minibatch():
        backward(model, rows=2)
    assert operations(transport) == MICROBATCH
    model.publish()
    model.close()
