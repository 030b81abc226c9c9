import math

import pytest
import torch
from ranks import LateTransport, RecordingTransport, on_ranks, run_ranks

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.work import Work
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.shard.units.unit import Unit

SHAPES = {"a": (3, 5), "b": (40,), "c": (), "d": (2, 2, 3), "e": (0, 4)}


def make_unit(transport: RecordingTransport) -> Unit:
    layout = FlatLayout.build(
        "u", [ParameterSpec(name, shape, True) for name, shape in SHAPES.items()], transport.group.size
    )
    transport.allocate([layout])
    return Unit("u", [layout], [0])


def reduced(ranks: list[tuple[FlatLayout, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Full gradients out of the shards."""
    layout = ranks[0][0]
    flat = torch.cat([shard for _, shard in ranks])
    used = torch.zeros_like(flat, dtype=torch.bool)
    for slot in layout.ranges:
        used[slot.start : slot.stop] = True
    assert not flat[~used].any(), "padding was touched"
    return {slot.spec.name: flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.ranges}


def fullness(pusher: GradientPusher) -> float:
    return float(pusher.gradient_format.local_statistics()[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("names", [list("abcde"), ["a"], ["b", "d"], ["d", "a"], ["c"], ["e"], ["e", "c"], []], ids=str)
def test_gradients_arrive_where_they_belong(size: int, names: list[str]) -> None:
    gradients = [{name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(size)]

    def work(transport: RecordingTransport) -> tuple[FlatLayout, torch.Tensor]:
        unit, pusher = make_unit(transport), GradientPusher(transport)
        pusher.start()
        own = gradients[transport.group.rank]
        pusher.push(unit, list("abcde"), [own[name] if name in names else None for name in "abcde"])
        pusher.push(unit, names, [own[name] * 2 for name in names])
        pusher.finish()
        return unit.layouts[0], transport.gradients.shard(0)

    def settled(transport: RecordingTransport) -> tuple[FlatLayout, torch.Tensor]:
        layout, shard = work(transport)
        transport.publish_parameters()
        return layout, shard

    for name, gradient in reduced(run_ranks(size, settled)).items():
        expected = sum(own[name] * 3 for own in gradients) if name in names else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, expected)


@on_ranks(1)
def test_the_names_of_what_was_pushed(transport: RecordingTransport) -> None:
    unit, pusher = make_unit(transport), GradientPusher(transport)
    for name in "ae":
        pusher.start()
        assert pusher.parameters_with_gradient == set()
        pusher.push(unit, [name, "b"], [torch.ones(SHAPES[name]), None])
        pusher.finish()
        assert pusher.parameters_with_gradient == {name}


@on_ranks(1, param_dtype=torch.float32, reduce_dtype=torch.float32)
def test_whatever_form_a_gradient_has(transport: RecordingTransport) -> None:
    base = torch.randn(5, 3)
    forms = {
        "a": base.t(),
        "b": torch.tensor(2.5, dtype=torch.float64).expand(40),
        "c": torch.tensor(1.25, dtype=torch.bfloat16),
        "d": torch.randn(3, 2, 2).permute(1, 2, 0),
    }
    unit, pusher = make_unit(transport), GradientPusher(transport)
    pusher.start()
    pusher.push(unit, list(forms), list(forms.values()))
    pusher.push(unit, ["a"], [base.t().to_sparse()])
    indices = torch.tensor([[0, 2, 2]])
    values = torch.tensor([1.0, 2.0, 4.0])
    pusher.push(unit, ["b"], [torch.sparse_coo_tensor(indices, values, (40,), check_invariants=True)])
    pusher.finish()
    arrived = reduced([(unit.layouts[0], transport.gradients.shard(0))])
    assert arrived["a"].dtype == torch.float32
    torch.testing.assert_close(arrived["a"], base.t() * 2)
    twice_indexed = torch.full((40,), 2.5)
    twice_indexed[0] += 1.0
    twice_indexed[2] += 6.0
    torch.testing.assert_close(arrived["b"], twice_indexed)
    assert float(arrived["c"]) == 1.25
    torch.testing.assert_close(arrived["d"], forms["d"])


def test_only_the_stretch_with_gradients_travels() -> None:
    sent: list[tuple[int, int]] = []

    class Measuring(RecordingTransport):
        def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
            sent.append((start, gradient.numel()))
            return super().accumulate(index, gradient, start)

    def work(transport: RecordingTransport) -> None:
        unit, pusher = make_unit(transport), GradientPusher(transport)
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
    unit, pusher = make_unit(transport), GradientPusher(transport, prefetch)
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@on_ranks(1)
def test_finite_covers_every_push_since_the_start(transport: RecordingTransport, value: float) -> None:
    unit, pusher = make_unit(transport), GradientPusher(transport)
    for bad in (False, True, False):
        pusher.start()
        assert fullness(pusher) == 0
        pusher.push(unit, ["b"], [torch.ones(40)])
        assert 0 < fullness(pusher) < 1
        gradient = torch.ones(40)
        gradient[17] = value if bad else 1e38
        pusher.push(unit, ["a", "b"], [torch.ones(3, 5), gradient])
        pusher.push(unit, ["c"], [torch.tensor(1.0)])
        assert (fullness(pusher) < 1) is not bad
        pusher.finish()


@on_ranks(1)
def test_the_buffer_s_old_content_is_no_gradient(transport: RecordingTransport) -> None:
    """Padding and parameters without a gradient between two that have one are zero, whatever the buffer held."""
    unit, pusher = make_unit(transport), GradientPusher(transport)
    pusher.start()
    pusher.push(unit, ["a", "b", "c", "d"], [torch.full(SHAPES[name], math.nan) for name in "abcd"])
    pusher.finish()
    transport.gradients.shard(0).zero_()
    pusher.start()
    for _ in range(3):
        pusher.push(unit, ["d", "a"], [torch.ones(2, 2, 3), torch.ones(3, 5)])
    pusher.finish()
    assert fullness(pusher) < 1
    arrived = reduced([(unit.layouts[0], transport.gradients.shard(0))])
    assert torch.equal(arrived["a"], torch.full((3, 5), 3.0).double())
    assert not arrived["b"].any() and not arrived["c"].any()
