"""A short form of tests/soak/rollout_soak.py: every completion is trained once, through many short steps."""

import pytest
import rollout_soak

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

STEPS = 300


@pytest.mark.parametrize("store_bytes", rollout_soak.STORES)
def test_every_completion_is_trained_once_as_it_was_generated(world, grpo_dir, store_bytes):
    found = rollout_soak.soak(world, grpo_dir, STEPS, world.size, store_bytes)
    assert all(each.num_checked > STEPS for each in found)
    kept, others = (
        sum(getattr(each, name) for each in found) for name in ("num_not_stored", "num_claimed_from_others")
    )
    # A store with space for one or two groups is full or not, depending on the speed of ranks.
    if store_bytes == 0:
        assert kept > 0 and others == 0
    elif store_bytes == max(rollout_soak.STORES):
        assert kept == 0 and others > 0
