"""Each rule of docs/ordering.md over the adversary: where the rule is broken, the test of its name fails."""

import time

import pytest
import torch
from adversary import Adversary
from parity import check_parity, sgd, squares
from ranks import on_ranks
from test_model_parity import Branches, calling
from toy_models import INPUT, Layer, Stack

from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel


def adversary(**settings):
    return type("Adversary", (Adversary,), settings)


def check(kind, **options):
    """Train with SGD, because Adam's steps do not depend on the scale of gradients; most guesses of units are wrong."""
    minibatches = calling((0, 1, 2), (2, 0), (1, 1, 2), (2, 1, 0), (0,), (0, 2, 1))
    options = {"make_optimizer": sgd, "max_norm": None} | options
    check_parity(Branches(), minibatches, 3, units=[Layer], kind=kind, **options)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_pushes_are_complete_at_their_owners_before_all_ranks_know_it(prefetch):
    """Nothing arrives before the flush, and the flushes of some ranks take longer."""

    class SlowFlush(adversary(share_at_once=0.0)):
        def flush(self):
            time.sleep(0.01 * self.rank)
            super().flush()

    check(SlowFlush, prefetch=prefetch)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_an_owner_reads_its_gradients_after_all_ranks_have_flushed(reduce_dtype):
    """Gradients of another type than the parameters are converted when they are read."""
    check(Adversary, reduce_dtype=reduce_dtype, tolerance=1e-5 if reduce_dtype == torch.float32 else 1e-9)


@on_ranks(2, transport=adversary(share_delayed=1.0, delay_s=0.02))
def test_nothing_is_fetched_between_completion_and_publication(transport):
    model = ShardedModel(Stack(4).double(), transport, units=[Layer], prefetch=1)
    for is_last in (False, True):
        with model.minibatch():
            if is_last:  # it ends while the next unit is on its way
                model.module.layers[0](model.module.first(INPUT))
                assert transport.buffers.on_the_way
            else:
                squares(model, (INPUT,)).backward()
        for use in (lambda: model(INPUT), model.state_dict):
            with pytest.raises(RuntimeError, match=r"evaluate or save after publish\(\)"):
                use()
        model.publish()
    model.close()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_gradients_are_cleared_before_the_publication(prefetch):
    """Where pushes arrive at once, the first of the next minibatch come right after it."""
    check(adversary(share_at_once=1.0, delay_s=0.0), prefetch=prefetch)


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_buffer_is_reused_while_an_operation_uses_it(prefetch, budget):
    check(adversary(share_delayed=1.0), prefetch=prefetch, budgets=lambda _: CacheBytes(budget, budget))
