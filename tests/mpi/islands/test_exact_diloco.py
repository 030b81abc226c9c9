"""Exact runs on islands that train apart: the same bits for any number of ranks per island, and after a resume."""

import shutil

import pytest
from exact_runs import ExactRuns

from odc_mpi.checkpoint.commands import open_newest_checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(4)]

#: Two fragments, of which one is in flight after each odd step.
OUTER = {
    "islands__mode": "outer",
    "islands__sync_every": 4,
    "islands__fragments": 2,
    "islands__delay": 1,
    "islands__local_share": 0.25,
    "islands__wire": "e3m0",
    "islands__error_feedback": "true",
}


@pytest.fixture
def exact(world, base, dataset_path):
    return ExactRuns.of_sequences(world, base, dataset_path, run__steps=7, run__eval_every=2)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "e3m0"])
def test_the_bits_of_two_islands_do_not_depend_on_their_ranks(world, exact, wire):
    outer = OUTER | {"islands__wire": wire, "islands__error_feedback": str(wire == "e3m0").lower()}
    pair = world.split(world.rank // 2)
    wanted = exact.train("pair", pair, **outer, islands__by=1)
    found = exact.train("all", world, **outer, islands__by=2, data__balance="dynamic", comm__zero_copy="off")
    assert found == wanted
    assert [line["step"] for line in wanted[1] if line.get("contributions_left_out") == 0] == [2, 4, 6, 7]


@pytest.mark.parametrize("feedback", ["true", "false"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_did_not_stop(world, exact, feedback):
    """Also on islands of other sizes, and with and without error feedback. A checkpoint is saved after a merge."""
    pair, outer = world.split(world.rank // 2), OUTER | {"islands__error_feedback": feedback}
    wanted, lines = exact.train("whole", world, **outer, islands__by=2)
    _, begin = exact.train("first", world, **outer, islands__by=2, run__checkpoint_every=3)
    world.gather_objects(None)  # the other ranks have read the digest
    if world.rank == 0:
        step = {number: f"step_{number:08d}" for number in (6, 7)}
        for island in ("0", "1"):  # as if the run had been killed
            shutil.rmtree(exact.base / "first" / "islands" / island / "checkpoints" / step[6])
        (exact.base / "first" / "islands" / "1" / "checkpoints" / step[7] / f"{step[7]}_rank_00001.h5").unlink()
    world.gather_objects(None)
    for name, among, by in (("second", world, 2), ("third", pair, 1)):
        digest, end = exact.train(name, among, **outer, islands__by=by, run__resume=exact.base / "first")
        assert [*begin[:4], *end] == lines
        assert digest == wanted


@pytest.mark.parametrize("by", ["off", 1, 2], ids=["without islands", "four islands", "hybrid"])
def test_a_run_goes_on_from_the_merged_parameters_on_other_islands(world, exact, by, capsys):
    exact.train("first", world, **OUTER, islands__by=2, run__checkpoint_every=4)
    saved = exact.base / "first" / "islands" / "1" / "checkpoints" / "step_00000004"
    others = {"off": {}, 1: OUTER | {"islands__by": 1}, 2: {"islands__by": 2}}[by]
    capsys.readouterr()
    _, lines = exact.train("second", world, **others, run__resume=saved, run__eval_every=1)
    output = "; begins with the merged parameters, and the optimizer state of one island\n"
    assert (output in capsys.readouterr().out) == (world.rank == 0)
    assert [line["step"] for line in lines] == [5, 6, 7]
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] + 0.1
    if world.rank == 0:
        with open_newest_checkpoint(exact.base / "second") as checkpoint:
            assert ("islands" in checkpoint.manifest.metadata) == (by == 1)
