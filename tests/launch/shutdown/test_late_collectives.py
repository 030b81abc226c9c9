"""Collectives within microbatches: a rank that is late, or elsewhere, is named within the deadline."""

import re

from test_late_ranks import LAST_SEEN, LIMIT, WAITED, the_line

SHARDED = """
from odc_mpi.api import decide_for

model = odc_mpi.shard_model(module, world, units=[Block], decision=decide_for(world, transport="collective"))
"""

SLEEPS = SHARDED + "train(model, blocks)\n"

ENDS_EARLY = (
    SHARDED
    + """
with model.minibatch():
    for microbatch in range(2 if world.rank == 1 else 3):
        model(torch.randn(2, 8)).mean().backward()
model.publish()
"""
)

ANOTHER_UNIT = (
    SHARDED
    + """
with model.minibatch():
    with torch.no_grad():
        blocks[2 if world.rank == 1 else 1](torch.randn(2, 8))
"""
)


def test_a_rank_that_sleeps_in_a_forward(tmp_path):
    line = the_line(tmp_path, SLEEPS)
    # The others hold unit 1 already, and want the next.
    output = (
        WAITED + r"gathering unit 2: late is rank 1 on \S+, " + LAST_SEEN + "in microbatch 2, forward of unit 1" + LIMIT
    )
    assert re.fullmatch(output, line), line


def test_a_rank_that_runs_fewer_microbatches(tmp_path):
    """It has synchronized its gradients, the others have not; each side may be the first to report."""
    line = the_line(tmp_path, ENDS_EARLY)
    synchronizing, gathering = "synchronizing at gradients_complete", "gathering unit 0"
    ways = [f"{gathering}: .*rank 1 on .*{synchronizing}", f"{synchronizing}: .*rank [02] on .*{gathering}"]
    assert any(re.fullmatch(WAITED + way + ".*" + LIMIT, line) for way in ways), line


def test_a_rank_that_uses_another_unit(tmp_path):
    """Units of one size are not taken for each other."""
    line = the_line(tmp_path, ANOTHER_UNIT)
    ways = ["gathering unit 1: .*rank 1 on .*gathering unit 2", "gathering unit 2: .*rank [02] on .*gathering unit 1"]
    assert any(re.fullmatch(WAITED + way + ".*" + LIMIT, line) for way in ways), line
