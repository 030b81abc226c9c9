"""jobs/vision_language.py: ranks with images, with text alone and without data train as one process does."""

import pytest
import torch
import vision_language

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.slow]


def test_ranks_that_run_different_modules_train_as_one_process(world):
    losses, state = vision_language.train(world)
    alone_losses, alone = vision_language.train(world.split("self"))
    assert losses == pytest.approx(alone_losses, rel=1e-6) and losses[1] < losses[0]
    assert state.keys() == alone.keys() and any("visual" in name for name in state)
    for name in state:
        torch.testing.assert_close(state[name], alone[name], rtol=1e-6, atol=1e-6)
    initial = vision_language.build(None).state_dict()
    assert not torch.equal(
        state["model.visual.patch_embed.proj.weight"], initial["model.visual.patch_embed.proj.weight"]
    )
