import pytest
import torch
from ranks import LateTransport, RecordingTransport, on_ranks, run_ranks

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.traffic import TrafficCounter
from odc_mpi.comm.work import Work
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.shard.units.unit import Unit

SHAPES = {"a": (3, 5), "b": (40,), "c": (), "d": (2, 2, 3), "e": (0, 4)}


def make_unit(transport: RecordingTransport) -> Unit:
    layout = FlatLayout.build(
        "u", [ParameterSpec(name, shape, True) for name, shape in SHAPES.items()], transport.group.size
    )
    transport.allocate([layout])
    return Unit("u", [layout], [0])


def make_pusher(transport: RecordingTransport, prefetch: int = 0) -> GradientPusher:
    return GradientPusher(transport, prefetch, SpanRecorder(), TrafficCounter(transport))


def reduced(ranks: list[tuple[FlatLayout, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Full gradients out of the shards."""
    layout = ranks[0][0]
    flat = torch.cat([shard for _, shard in ranks])
    used = torch.zeros_like(flat, dtype=torch.bool)
    for slot in layout.ranges:
        used[slot.start : slot.stop] = True
    assert not flat[~used].any(), "padding was touched"
    return {slot.spec.name: flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.ranges}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("names", [list("abcde"), ["a"], ["b", "d"], ["d", "a"], ["c"], ["e"], ["e", "c"], []], ids=str)
def test_gradients_arrive_where_they_belong(size: int, names: list[str]) -> None:
    gradients = [{name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(size)]

    def work(transport: RecordingTransport) -> tuple[FlatLayout, torch.Tensor]:
        unit, pusher = make_unit(transport), make_pusher(transport)
        pusher.start()
        own = gradients[transport.group.rank]
        pusher.push(unit, list("abcde"), [own[name] if name in names else None for name in "abcde"])
        pusher.push(unit, names, [own[name] * 2 for name in names])
        pusher.finish()
        transport.publish_parameters()
        return unit.layouts[0], transport.gradients.shard(0)

    for name, gradient in reduced(run_ranks(size, work)).items():
        expected = sum(own[name] * 3 for own in gradients) if name in names else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, expected)


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
@on_ranks(1, transport=LateTransport)
def test_a_push_is_waited_for_before_its_memory_is_used_again(
    transport: LateTransport, prefetch: int, num_buffers: int
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
    assert torch.equal(
        reduced([(unit.layouts[0], transport.gradients.shard(0))])["b"], torch.full((40,), 15.0).double()
    )
    assert pusher.buffers.peak_bytes == num_buffers * 40 * 8 and not pusher.buffers._in_use
    pusher.close()
