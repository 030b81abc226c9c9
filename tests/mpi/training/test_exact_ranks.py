"""An exact run on all ranks gives the bits of an exact run on one, however its microbatches and sums come about."""

import json
import time

import pytest
import torch
from exact_runs import ExactRuns
from small_training import assert_like_plain, configure

from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.recipes.sft.objective import SFTObjective

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(3)]

STEPS = 5


@pytest.fixture
def exact(world, base, dataset_path):
    return ExactRuns.of_sequences(world, base, dataset_path, **{"run.steps": STEPS})


def check(exact, world, way, **model):
    """Compare a run on all ranks with one on a rank by itself, which has `model` in common with it, not `way`."""
    digest, lines = exact.train("all", world, **model, **way)
    assert (digest, lines) == exact.alone(**model)
    assert 0 <= lines[-1]["fixed64_relative_error"] < 1e-9 and "eval_loss" in lines[-1]


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
def test_the_bits_are_those_of_one_rank(world, exact, reduction):
    check(exact, world, {"comm__reduction": reduction})


@pytest.mark.parametrize(
    "way",
    [
        {"data__balance": "dynamic", "comm__zero_copy": "off", "comm__prefetch": 2},
        {"comm__reduction": "mailbox", "comm__zero_copy": "off", "comm__prefetch": 0},
        {"comm__parameter_cache_bytes": 0, "comm__gradient_cache_bytes": 0, "comm__zero_copy": "off"},
        {"data__cost": "fitted", "comm__gradient_cache_bytes": 0},
    ],
    ids=lambda way: "-".join(map(str, way.values())),
)
def test_how_ranks_share_the_work_changes_no_bit(world, exact, way):
    check(exact, world, way)


@pytest.mark.parametrize(
    "model",
    [
        {"model__param_dtype": "bfloat16"},
        {"model__gradient_checkpointing": "true", "optim__optimizer": "sgd", "optim__momentum": 0.9},
        {"model__config__attention_dropout": 0.2, "model__config__tie_word_embeddings": "true"},
        {"lora__r": 4, "lora__dropout": 0.1},
    ],
    ids=["bf16", "checkpointing", "dropout", "lora"],
)
def test_it_holds_for_models_of_all_kinds(world, exact, model):
    check(exact, world, {"data__balance": "dynamic", "comm__zero_copy": "off"}, **model)


@pytest.mark.sizes(2, 3)
def test_ranks_without_a_microbatch_change_no_bit(world, exact):
    check(exact, world, {"data__balance": "dynamic"}, data__minibatch_sequences=1)


@pytest.mark.sizes(2)
def test_slow_ranks_change_no_bit(world, exact, monkeypatch):
    """Rank 1 takes a while for each microbatch, so that rank 0 draws most of them."""
    wanted = exact.alone()
    backward = SFTObjective.on_microbatch_end

    def late(self, result):
        time.sleep(0.03 * world.rank)
        backward(self, result)

    monkeypatch.setattr(SFTObjective, "on_microbatch_end", late)
    assert exact.train("all", world, data__balance="dynamic", comm__prefetch=2) == wanted


@pytest.mark.sizes(4)
@pytest.mark.parametrize("islands", [{}, {"islands__by": 2}], ids=["flat", "islands"])
def test_a_run_that_goes_on_twice_on_other_numbers_of_ranks(world, exact, islands):
    wanted, wanted_lines = exact.alone()
    first, second = (exact.base / name / "checkpoints" for name in ("first", "second"))
    _, begin = exact.train("first", world, **islands, run__checkpoint_every=2, run__trace_steps=1)
    resumed = {"run__checkpoint_every": 2, "run__resume": first / "step_00000002"}
    _, middle = exact.train("second", world.split("self"), **resumed)
    last = dict.fromkeys(islands, 1)
    digest, end = exact.train("third", world, **last, run__resume=second / "step_00000004")
    assert [lines[0]["step"] for lines in (begin, middle, end)] == [1, 3, 5]
    assert [*begin[:2], *middle[:2], *end] == wanted_lines
    assert digest == wanted
    if islands:
        check_records_of_islands(exact.base / "first", 2)


def test_fixed_point_sums_alone_train_as_plain_torch_does(world, dataset_path):
    changes = {"data.balance": "lb_mini", "model.reduce_dtype": "fixed64"}
    assert_like_plain(configure(dataset_path, **changes), world, like=configure(dataset_path))


@pytest.mark.sizes(2)
def test_changes_since_a_checkpoint_are_reported_or_refused(world, exact, monkeypatch, capsys):
    settings = {"run__checkpoint_every": 5, "optim__lr_scheduler_type": "constant"}
    exact.train("run", world, **settings)
    assert json.loads((exact.base / "run" / "summary.json").read_text())["arithmetic"]["run.threads"] == "1"
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", f"rank {world.rank}")
    with pytest.raises(
        AllRanksUserError, match=r"^NPY_DISABLE_CPU_FEATURES: expected the same on every rank with run.exact"
    ):
        exact.train("run", world, **settings, run__steps=6)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "some")
    capsys.readouterr()
    _, lines = exact.train("run", world, **settings, run__steps=6)
    assert lines[-1]["step"] == 6
    output = "WARNING: run.exact: NPY_DISABLE_CPU_FEATURES not set -> some since the checkpoint"
    assert (output in capsys.readouterr().err) == (world.rank == 0)
    try:
        with pytest.raises(
            AllRanksUserError, match=r"^run.threads: expected 1 with run.exact, as in the checkpoint .* got 2"
        ):
            exact.train("run", world, **settings, run__steps=7, run__threads=2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("way", "model"),
    [
        ({"comm__reduction": "accumulate", "data__balance": "dynamic"}, {"optim__max_grad_norm": 0.1}),
        ({"comm__reduction": "mailbox", "comm__zero_copy": "off"}, {"lora__r": 4}),
        ({"comm__zero_copy": "off", "comm__prefetch": 2}, {"model__param_dtype": "bfloat16"}),
    ],
    ids=["in place", "lora, by mailbox", "bf16, copied"],
)
def test_islands_change_no_bit(world, exact, ranks, way, model):
    if world.size % ranks or ranks == world.size:
        pytest.skip("no islands of this size")
    check(exact, world, way | {"islands__by": ranks}, **model)


def check_records_of_islands(run, num_islands):
    """A line has the waits of the step before it."""
    summary, trace = (json.loads((run / name).read_text()) for name in ("summary.json", "trace.json"))
    waits_s = [json.loads(line)["island_wait_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["num_islands"] == trace["num_islands"] == num_islands
    assert waits_s[0] == 0 and min(waits_s[1:]) > 0
    assert sum(waits_s) < summary["island_wait_s"] <= summary["boundary_wait_s"]
