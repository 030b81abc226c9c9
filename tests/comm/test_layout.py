import random

import pytest
import torch

from odc_mpi.comm.layout import ALIGNMENT_NUMEL, FlatLayout, ParameterSpec, ranges_by_owner

SHAPES = [(), (1,), (0,), (3, 0), (31,), (32,), (33,), (5, 7), (2, 3, 4), (64, 3), (127,), (257,)]


def random_layout(rng: random.Random) -> FlatLayout:
    shapes = [rng.choice(SHAPES) for _ in range(rng.randint(1, 6))]
    specs = [ParameterSpec(f"p{i}", shape, True) for i, shape in enumerate(shapes)]
    return FlatLayout.build("unit", specs, rng.randint(1, 9))


def with_islands(layout: FlatLayout, num_islands: int) -> FlatLayout:
    specs = [parameter.spec for parameter in layout.ranges]
    return FlatLayout.build("unit", specs, layout.num_owners * num_islands, num_islands)


LAYOUTS = [random_layout(random.Random(seed)) for seed in range(200)]


def test_slots_follow_each_other_aligned_and_as_close_as_alignment_allows() -> None:
    for layout in LAYOUTS:
        end = 0
        for parameter in layout.ranges:
            assert parameter.start % ALIGNMENT_NUMEL == 0
            assert 0 <= parameter.start - end < ALIGNMENT_NUMEL
            end = parameter.stop
        assert layout.numel == end


@pytest.mark.parametrize("num_islands", [1, 2, 5])
def test_each_island_covers_the_flat_array_and_each_element_has_one_owner(num_islands: int) -> None:
    for layout in (with_islands(layout, num_islands) for layout in LAYOUTS):
        island, size = layout.island_layout, layout.num_owners // num_islands
        assert (island.num_owners, island.numel, island.num_islands) == (size, layout.numel, 1)
        owned = sorted(layout.owned(rank) for rank in range(layout.num_owners))
        assert [i for start, stop in owned for i in range(start, stop)] == list(range(layout.numel))
        for rank in range(layout.num_owners):
            start, stop = layout.owned(rank)
            first, last = island.owned(rank % size)
            assert start == stop or first <= start < stop <= last


def test_shards_are_aligned_and_no_larger_than_alignment_asks() -> None:
    for layout in LAYOUTS:
        assert layout.shard_numel % ALIGNMENT_NUMEL == 0 and layout.shard_numel > 0
        assert layout.shard_numel * layout.num_owners >= layout.numel
        assert layout.shard_numel - ALIGNMENT_NUMEL < max(1, -(-layout.numel // layout.num_owners))
        for rank in range(layout.num_owners):
            start, stop = layout.owned(rank)
            assert stop - start <= layout.shard_numel
            assert start == stop or start == rank * layout.shard_numel


def test_slices_reassemble_every_parameter() -> None:
    for layout in LAYOUTS:
        flat = torch.arange(layout.numel) + 1
        values = {parameter.spec.name: flat[parameter.start : parameter.stop] for parameter in layout.ranges}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in values}
        for rank in range(layout.num_owners):
            first, last = layout.owned(rank)
            shard = torch.zeros(layout.shard_numel, dtype=flat.dtype)
            shard[: last - first] = flat[first:last]
            slices = layout.slices(rank)
            assert [interval.spec for interval in slices] == [parameter.spec for parameter in layout.ranges]
            for interval in slices:
                assert 0 <= interval.start <= interval.stop <= interval.spec.numel
                assert interval.offset >= 0 and (
                    interval.numel == 0 or interval.offset + interval.numel <= layout.shard_numel
                )
                part = shard[interval.offset : interval.offset + interval.numel]
                assert torch.equal(part, values[interval.spec.name][interval.start : interval.stop])
                parts[interval.spec.name].append(part)
        for name, value in values.items():
            assert torch.equal(torch.cat(parts[name]), value)


@pytest.mark.parametrize("num_islands", [1, 2, 5])
def test_the_owners_of_a_parameter_are_those_that_have_a_slice_of_it(num_islands: int) -> None:
    for layout in (with_islands(layout, num_islands) for layout in LAYOUTS):
        of_all = [(rank, interval) for rank in range(layout.num_owners) for interval in layout.slices(rank)]
        for parameter in layout.ranges:
            expected = [(rank, x.start, x.stop) for rank, x in of_all if x.spec is parameter.spec and x.numel]
            assert list(layout.owners(parameter)) == sorted(expected, key=lambda part: part[1])


def test_a_stretch_is_split_by_owner_beginning_after_this_rank() -> None:
    rng = random.Random(1)
    for layout in LAYOUTS:
        for _ in range(20):
            start = rng.randint(0, layout.numel)
            stop = rng.randint(start, layout.numel)
            size, this_rank = layout.num_owners, rng.randrange(layout.num_owners)
            owned = [(rank, *layout.owned(rank)) for rank in (*range(this_rank + 1, size), *range(this_rank + 1))]
            parts = [(rank, max(start, first), min(stop, last)) for rank, first, last in owned]
            expected = [(rank, begin, end) for rank, begin, end in parts if begin < end]
            assert list(ranges_by_owner(layout.shard_numel, this_rank, start, stop)) == expected


def test_trainable_and_frozen_do_not_mix() -> None:
    with pytest.raises(AssertionError, match="need two arrays"):
        FlatLayout.build("mixed", [ParameterSpec("a", (1,), True), ParameterSpec("b", (1,), False)], 2)
