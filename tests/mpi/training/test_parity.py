"""Training over windows gives the losses and parameters of a plain loop on one process."""

import pytest
from pretended_nodes import on_nodes_of_three
from small_training import (
    FROZEN,
    FROZEN_IDS,
    assert_bf16_follows,
    assert_like_plain,
    configure,
    expected,
    run,
    train_to_the_end,
)

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.models import build as models
from odc_mpi.models import families

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]
#: For results that may depend on the number of ranks.
EVERY_SIZE = pytest.mark.sizes(1, 2, 3, 4)


@EVERY_SIZE
@pytest.mark.parametrize(
    ("balance", "tied", "prefetch"),
    [
        ("local_sort", True, 0),
        ("local_sort", False, 2),
        ("lb_micro", False, 0),
        ("lb_mini", True, 1),
        ("lb_mini", False, 2),
        ("dynamic", True, 0),
        ("dynamic", False, 1),
    ],
)
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, balance, tied, prefetch):
    changes = {
        "data.balance": balance,
        "model.config.tie_word_embeddings": str(tied).lower(),
        "comm.prefetch": prefetch,
    }
    config = configure(dataset_path, **changes)
    _, state = assert_like_plain(config, world)
    start = models.from_config(config.model.config, config.run.seed).weights
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
        first = start.read(name, 0, state[name].numel()).view(state[name].shape)
        moved = (state[name] - first).norm() / first.norm()
        assert moved > 1e-2, f"{name} hardly moved ({moved:.1e}): whatever stood still would agree"


@pytest.mark.parametrize("freeze", FROZEN, ids=FROZEN_IDS)
def test_frozen_parameters_do_not_change_and_the_others_are_trained(world, dataset_path, freeze):
    config = configure(dataset_path, **{"data.balance": "lb_mini", "model.config.tie_word_embeddings": "false"})
    assert_like_plain(config, world, freeze)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_activation_checkpointing_changes_nothing(world, dataset_path, prefetch):
    config = configure(dataset_path, **{"model.gradient_checkpointing": "true", "comm.prefetch": prefetch})
    assert_like_plain(config, world)


@pytest.mark.parametrize("balance", ["lb_mini", "dynamic"])
def test_a_cost_that_is_learned_changes_plans_and_nothing_else(world, dataset_path, balance):
    config = configure(dataset_path, **{"data.balance": balance, "data.cost": "fitted", "run.steps": 8})
    dataset, metrics, _ = run(config, world)
    losses, _ = expected(config, dataset)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)


def test_through_mailboxes(world, dataset_path):
    """A mailbox for about a tenth of a unit's gradient, and a different number of microbatches on each rank."""
    mailbox = {"comm.reduction": "mailbox", "comm.mailbox_bytes": 1024 * world.size}
    assert_like_plain(configure(dataset_path, **{"data.balance": "lb_mini", **mailbox}), world)


@pytest.mark.sizes(4)
def test_islands_of_which_one_spans_two_nodes(world, dataset_path, monkeypatch):
    nodes = on_nodes_of_three(world, monkeypatch)
    islands = Islands(nodes, 2)
    assert islands.island.num_nodes == 1 + islands.index
    islands.close()
    assert_like_plain(configure(dataset_path, **{"islands.by": 2}), nodes)
    nodes.close()


def test_bf16_parameters_follow_the_fp32_run(world, dataset_path):
    """Parameters travel and compute in bf16, 8 bits of mantissa; the masters keep what small updates add up to."""
    assert_bf16_follows(configure(dataset_path, **{"model.param_dtype": "bfloat16"}), world)


@EVERY_SIZE
def test_fewer_sequences_than_ranks(world, dataset_path):
    """Some ranks have no microbatch at all; nothing is lost and no rank hangs."""
    config = configure(dataset_path, **{"data.minibatch_sequences": 1})
    metrics, _ = assert_like_plain(config, world)
    fewest = 1 if world.size == 1 else 0
    assert all((m["microbatches_min"], m["microbatches_max"]) == (fewest, 1) for m in metrics)


@pytest.mark.parametrize(("balance", "exact"), [("lb_mini", False), ("dynamic", True)])
def test_losses_are_those_of_packed_training(world, dataset_path, base, monkeypatch, balance, exact):
    """Also in evaluations. The model refuses a microbatch of more than one sequence."""
    changes = {"data.balance": balance, "data.eval_path": dataset_path, "run.eval_every": 2, "run.exact": exact}
    packed, _ = train_to_the_end(configure(dataset_path, **changes, **{"run.dir": base / "packed"}), world)
    monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")
    alone, _ = train_to_the_end(configure(dataset_path, **changes, **{"run.dir": base / "alone"}), world)
    for name in ("loss", "eval_loss"):
        expected, found = ([line[name] for line in lines if name in line] for lines in (packed, alone))
        assert expected and found == pytest.approx(expected, rel=1e-5)
