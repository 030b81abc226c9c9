import numpy as np
import pytest
import torch
from adversary import Adversary
from ranks import RecordingTransport, on_ranks, run_ranks

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.work import Work
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.spans import SpanRecorder
from odc_mpi.shard.units.unit import Unit

SHAPES = {"a": (3, 5), "b": (40,), "c": (), "d": (2, 2, 3), "e": (0, 4)}


def make_unit(transport: RecordingTransport) -> Unit:
    layout = FlatLayout.build(
        "u", [ParameterSpec(name, shape, True) for name, shape in SHAPES.items()], transport.group.size
    )
    transport.allocate([layout])
    return Unit("u", [layout], [0])


def make_pusher(transport: RecordingTransport, prefetch: int = 0) -> GradientPusher:
    return GradientPusher(transport, prefetch, SpanRecorder())


def test_only_the_stretch_with_gradients_travels() -> None:
    sent: list[tuple[int, int]] = []

    class Measuring(RecordingTransport):
        def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
            sent.append((start, gradient.numel()))
            return super().accumulate(index, gradient, start)

    def work(transport: RecordingTransport) -> None:
        unit, pusher = make_unit(transport), make_pusher(transport)
        pusher.start()
        pusher.push(unit, list("abcde"), [None, torch.ones(40), torch.tensor(1.0), None, None])
        pusher.push(unit, ["d"], [torch.ones(2, 2, 3)])
        pusher.push(unit, ["e"], [torch.ones(0, 4)])
        pusher.push(unit, list("abcde"), [None] * 5)
        pusher.finish()

    run_ranks(1, work, transport=Measuring)
    assert sent == [(32, 64 + 1), (128, 12)]


@pytest.mark.parametrize(("prefetch", "num_buffers"), [(0, 2), (1, 2), (3, 4)])
@on_ranks(1, transport=Adversary)
def test_a_push_is_waited_for_before_its_memory_is_used_again(
    transport: Adversary, prefetch: int, num_buffers: int
) -> None:
    """Also where the network reads the gradient late."""
    unit, pusher = make_unit(transport), make_pusher(transport, prefetch)
    transport.publish_parameters()
    pusher.start()
    for i in range(1, 6):
        pusher.push(unit, ["b"], [torch.full((40,), float(i))])
        done = len(transport.names("push"))
        assert done == max(0, i - num_buffers) or (prefetch and i - num_buffers <= done <= i)
    pusher.finish()
    assert len(transport.names("push")) == 5
    transport.complete_gradients(np.zeros(1))
    assert transport.gradients.shard(0).sum() == 40 * 15
    assert pusher.buffers.peak_bytes == num_buffers * 40 * 8 and not pusher.buffers._in_use
    pusher.close()
