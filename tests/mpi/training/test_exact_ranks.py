"""An exact run on all ranks gives the bits of an exact run on one, however its microbatches and sums come about."""

import time

import pytest
import torch
from small_training import assert_like_plain, configure, train_to_the_end

from odc_mpi.checkpoint.commands import digest_line
from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.objectives.sft import SFTObjective

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(3)]

STEPS = 5
#: Digests of runs on one rank, by what they depend on.
_references = {}


@pytest.fixture
def train(world, base, dataset_path):
    """`train(name, world, **settings)` runs exactly; returns its digest, the steps' metrics, and its summary."""

    def start(name, among, **changes):
        folder = base / (name if among is world else f"{name}_{world.rank}")
        settings = {
            "data.minibatch_sequences": 11,
            "run.steps": STEPS,
            "run.dir": folder,
            "run.exact": "true",
            "run.checkpoint_every": 50,
            "optim.adam_epsilon": 1e-8,
            "run.trace_steps": 0,
            "data.eval_path": dataset_path,
            "data.eval_sequences": 9,
        }
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        lines, summary = train_to_the_end(configure(dataset_path, **(settings | changes)), among, world)
        return digest_line(folder).split()[0], lines, summary

    start.base = base
    return start


def without_times(lines):
    """Keep the metrics that depend neither on time nor on ranks."""
    names = ("loss", "grad_norm", "fixed64_relative_error", "eval_loss", "num_tokens", "skipped", "learning_rate")
    return [{name: line.get(name) for name in names} for line in lines]


def reference(train, world, **changes):
    """The run on a rank by itself, each rank in a directory of its own."""
    key = repr(sorted(changes.items()))
    if key not in _references:
        digest, lines, summary = train("alone", world.split("self"), **changes)
        assert summary["parameters_digest"] == digest
        _references[key] = digest, without_times(lines)
    return _references[key]


def check(train, world, way, **model):
    """Compare a run on all ranks with one on a rank by itself, which has `model` in common with it, not `way`."""
    wanted, wanted_lines = reference(train, world, **model)
    digest, lines, summary = train("all", world, **model, **way)
    assert without_times(lines) == wanted_lines
    assert digest == wanted == summary["parameters_digest"]
    assert 0 <= summary["fixed64_relative_error"] < 1e-9


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
def test_the_bits_are_those_of_one_rank(world, train, reduction):
    check(train, world, {"comm__reduction": reduction})


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
def test_how_ranks_share_the_work_changes_no_bit(world, train, way):
    check(train, world, way)


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
def test_it_holds_for_models_of_all_kinds(world, train, model):
    check(train, world, {"data__balance": "dynamic", "comm__zero_copy": "off"}, **model)


@pytest.mark.sizes(2, 3)
def test_ranks_without_a_microbatch_change_no_bit(world, train):
    check(train, world, {"data__balance": "dynamic"}, data__minibatch_sequences=1)


@pytest.mark.sizes(2)
def test_slow_ranks_change_no_bit(world, train, monkeypatch):
    """Rank 1 takes a while for each microbatch, so that rank 0 draws most of them."""
    wanted, wanted_lines = reference(train, world)
    backward = SFTObjective.on_microbatch_end

    def late(self, result):
        time.sleep(0.03 * world.rank)
        backward(self, result)

    monkeypatch.setattr(SFTObjective, "on_microbatch_end", late)
    digest, lines, _ = train("all", world, data__balance="dynamic", comm__prefetch=2)
    assert digest == wanted and without_times(lines) == wanted_lines


@pytest.mark.sizes(4)
def test_a_run_that_goes_on_twice_on_other_numbers_of_ranks(world, train):
    wanted, wanted_lines = reference(train, world)
    _, first, _ = train("first", world, run__checkpoint_every=2)
    started = first[0]["step"]
    base = train.base
    node = world.split("self")
    _, second, _ = train("second", node, run__checkpoint_every=2, run__resume=base / "first/checkpoints/step_00000002")
    newest = base / f"second_{world.rank}/checkpoints/step_00000004"
    newest = world.gather_objects(newest)[2]
    digest, third, _ = train("third", world, run__resume=newest)
    assert (started, second[0]["step"], third[0]["step"]) == (1, 3, 5)
    assert without_times([*first[:2], *second[:2], *third]) == wanted_lines
    assert digest == wanted


def test_fixed_point_sums_alone_train_as_plain_torch_does(world, dataset_path):
    changes = {"data.balance": "lb_mini", "model.reduce_dtype": "fixed64"}
    assert_like_plain(configure(dataset_path, **changes), world, like=configure(dataset_path))


@pytest.mark.sizes(2)
def test_what_breaks_it_is_refused(world, train):
    with pytest.raises(AllRanksUserError, match=r"^data.balance: expected .* with run.exact, got lb_micro: "):
        train("refused", world, data__balance="lb_micro")


@pytest.mark.sizes(2)
def test_changes_since_a_checkpoint_are_reported_or_refused(world, train, monkeypatch, capsys):
    settings = {"run__checkpoint_every": 5, "optim__lr_scheduler_type": "constant"}
    _, _, summary = train("run", world, **settings)
    assert summary["arithmetic"]["run.threads"] == "1"
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", f"rank {world.rank}")
    with pytest.raises(
        AllRanksUserError, match=r"^NPY_DISABLE_CPU_FEATURES: expected the same on every rank with run.exact"
    ):
        train("run", world, **settings, run__steps=6)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "some")
    capsys.readouterr()
    _, lines, _ = train("run", world, **settings, run__steps=6)
    assert lines[-1]["step"] == 6
    output = "WARNING: run.exact: NPY_DISABLE_CPU_FEATURES not set -> some since the checkpoint"
    assert (output in capsys.readouterr().err) == (world.rank == 0)
    try:
        with pytest.raises(
            AllRanksUserError, match=r"^run.threads: expected 1 with run.exact, as in the checkpoint .* got 2"
        ):
            train("run", world, **settings, run__steps=7, run__threads=2)
    finally:
        torch.set_num_threads(1)
