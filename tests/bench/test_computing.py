import pytest

from odc_mpi.bench.progress.computing import choose_cores, kinds_of_work


@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [
        ([[0, 1], [0, 1]], [0, 1]),
        ([[0, 1], [0]], [1, 0]),
        ([[0, 1], [0, 1], [0, 1]], [0, 1, 0]),
        ([[3], [3]], [3, 3]),
        ([[4, 5, 6, 7], [0, 1, 2, 3]], [4, 0]),
    ],
    ids=["one each", "who may use another leaves the only one", "more ranks than cores", "bound to one", "apart"],
)
def test_cores_are_shared_by_as_few_as_can_be(allowed, chosen):
    assert choose_cores(allowed) == chosen


def test_all_kinds_but_idling_do_something_again_and_again():
    kinds = kinds_of_work()
    assert list(kinds) == ["large_products", "small_operations", "python"]
    for work in kinds.values():
        work()
        work()
