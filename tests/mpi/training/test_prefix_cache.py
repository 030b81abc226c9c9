"""Frozen layers whose output is computed once for each sequence, against the same run without that."""

import shutil

import h5py
import pytest
from small_training import configure, train_to_the_end

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError
from odc_mpi.shard.units.unit import Unit
from odc_mpi.training.rundir import prefix_cache

pytestmark = pytest.mark.mpi
#: Three passes over forty samples, with adapters in the last of three layers. Fetches transfer data.
SETTINGS = {
    "lora.r": 4,
    "lora.target_modules": "[q_proj,v_proj]",
    "lora.layers_to_transform": "[2]",
    "model.cache_frozen_prefix": "true",
    "model.config.tie_word_embeddings": "false",
    "data.minibatch_sequences": 10,
    "data.eval_sequences": 9,
    "optim.warmup_steps": 0,
    "run.steps": 12,
    "run.eval_every": 3,
    "run.trace_steps": 0,
    "comm.zero_copy": "off",
    "comm.parameter_cache_bytes": 0,
    "comm.prefetch": 2,
}
FROZEN = {"model.layers.0", "model.layers.1", "model.embed_tokens"}
DATA = {"sft": "dataset_path", "dpo": "pairs_path", "reward": "pairs_path", "kto": "labels_path"}
MORE = {"kto": {"kto.loss_type": "apo_zero_unpaired"}, "reward": {"model.config.pad_token_id": 0}}


@pytest.fixture
def settings(base):
    return SETTINGS | {"run.dir": base}


@pytest.fixture
def fetched(monkeypatch):
    """Names of the units that this rank begins to fetch."""
    names, start_fetch = [], Unit.start_fetch

    def start(unit, fetch):
        names.append(unit.name)
        start_fetch(unit, fetch)

    monkeypatch.setattr(Unit, "start_fetch", start)
    return names


@pytest.fixture
def fetched_by_step(fetched, monkeypatch):
    """The units that this rank has fetched until the end of each step and the evaluation after it."""
    steps, end = [], prefix_cache.PrefixCache.on_step_end

    def on_step_end(cache, step):
        end(cache, step)
        steps.append(set(fetched))
        fetched.clear()

    monkeypatch.setattr(prefix_cache.PrefixCache, "on_step_end", on_step_end)
    return steps


def results(lines):
    names = ("loss", "grad_norm", "eval_loss", "rewards/margins")
    return [[line[name] for name in names if name in line] for line in lines]


def run(world, data, settings, **changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {"data.eval_path": data.with_suffix(".eval.h5")} | settings | changes
    lines, _ = train_to_the_end(configure(data, **settings), world)
    return results(lines)


def plain(world, base, data, settings):
    folder = base.with_name(f"{base.name}_plain")
    return run(world, data, settings, model__cache_frozen_prefix="false", run__dir=folder)


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("objective", DATA)
def test_frozen_units_are_fetched_in_the_first_epoch_only(
    world, base, settings, fetched_by_step, objective, request, capsys
):
    """And results are those without, also of evaluations. This loss of KTO has no answers to other prompts."""
    data = request.getfixturevalue(DATA[objective])
    settings |= {"run.objective": objective} | MORE.get(objective, {})
    cached, printed = run(world, data, settings), capsys.readouterr().out
    assert [FROZEN & units for units in fetched_by_step[4:]] == [set()] * 8
    others = world.gather_objects(FROZEN & set().union(*fetched_by_step[1:4]))
    assert set().union(*others) == (set() if objective == "dpo" else FROZEN)  # the reference model is before step 1
    assert world.rank or "layers 0 to 1 of 3 are computed once: " in printed
    assert_equal(cached, plain(world, base, data, settings))


@pytest.mark.sizes(2)
def test_answers_to_other_prompts_are_computed_and_not_stored(world, base, settings, labels_path):
    settings |= {"run.objective": "kto", "run.steps": 8}
    cached = run(world, labels_path, settings)
    num_tokens = sum(len(h5py.File(path)["hidden"]) for path in (base / "frozen_prefix").glob("*.h5"))
    with Dataset(labels_path) as dataset, Dataset(labels_path.with_suffix(".eval.h5")) as held_out:
        assert num_tokens == dataset.lengths.sum() + held_out.lengths[:9].sum()
    assert_equal(cached, plain(world, base, labels_path, settings))


@pytest.mark.sizes(3)
def test_a_run_resumes_on_other_numbers_of_ranks(world, base, settings, dataset_path, fetched_by_step):
    """It finds what other ranks have stored, also after an end in the middle of the first epoch."""
    settings |= {"optim.lr_scheduler_type": "constant", "run.eval_every": 0}
    pair, found = world.split(world.rank // 2), None
    for steps, part in ((2, world), (6, world.split("self")), (12, pair)):
        if world.rank < part.size:
            found = run(part, dataset_path, settings, run__steps=steps)
        world.gather_objects(None)
    if world.rank == 1:
        fetched_by_step[2:2] = [set()] * 4
    if world.rank < 2:
        assert [bool(FROZEN & units) for units in fetched_by_step[4:]] == [False] * 8
    wanted = plain(world, base, dataset_path, settings)
    if world.rank < 2:
        assert [losses[:2] for losses in found] == [pytest.approx(losses[:2], rel=1e-6, abs=1e-7) for losses in wanted]


@pytest.mark.sizes(2)
@pytest.mark.parametrize("change", ["damage", "base", "data"])
def test_what_is_damaged_or_of_another_base_or_data_set_is_computed_again(
    world, base, settings, dataset_path, fetched_by_step, capsys, change
):
    settings |= {"run.resume": "never", "run.steps": 4, "run.eval_every": 0}
    settings |= dict.fromkeys(("data.eval_path", "data.eval_sequences"))
    run(world, dataset_path, settings)
    files = sorted((base / "frozen_prefix").glob("*.h5"))
    assert len(files) == 2
    if change == "damage" and world.rank == 0:
        with h5py.File(files[0], "r+") as file:
            file["hidden"][0] += 1
        files[1].write_bytes(files[1].read_bytes()[:100])
        files[1].with_name("0-0-1.partial").touch()
    evaluated = {"data.eval_path": dataset_path.with_suffix(".eval.h5")}
    settings |= {"base": {"run.seed": 1}, "data": evaluated, "damage": {}}[change]
    world.gather_objects(None)
    fetched_by_step.clear()
    capsys.readouterr()
    again = run(world, dataset_path, settings)
    assert world.rank or "frozen_prefix: 2 files deleted: of another base, tokenizer," in capsys.readouterr().out
    assert set().union(*world.gather_objects(set().union(*fetched_by_step))) >= FROZEN
    assert_equal(again, plain(world, base, dataset_path, settings))


@pytest.mark.sizes(2)
def test_room_on_the_disk_is_required_before_anything_is_written(world, base, settings, dataset_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 5000))
    with pytest.raises(
        AllRanksUserError, match=r"model.cache_frozen_prefix: expected 0.\d MiB of free disk space for .*"
    ):
        run(world, dataset_path, settings)
    assert not base.exists()
