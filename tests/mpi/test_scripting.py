"""`odc_mpi.train` and `odc_mpi.prepare` in a script: the same as the commands, on the ranks of a world."""

import json
from dataclasses import asdict

import pytest
from small_training import QWEN2, configure, train_to_the_end

import odc_mpi
from odc_mpi.errors import AllRanksUserError, UserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


def test_a_script_prepares_and_trains(world, base):
    """With worlds of its own, one after another, as without the argument `world`."""
    text = base / "lines.jsonl"
    if world.rank == 0:
        base.mkdir()
        text.write_text("".join(json.dumps({"text": "abc " * n}) + "\n" for n in range(3, 43)))
    world.gather_objects(None)
    report = odc_mpi.prepare(text, base / "data.h5", vocab_size=270, eval_fraction=0.2, world=world)
    assert report.num_sequences + report.num_eval_sequences == 40 and report.path == base / "data.h5"
    model = {"config": {**QWEN2, "vocab_size": report.vocab_size, "max_position_embeddings": 256}}
    result = odc_mpi.train(
        model=model, data=base / "data.h5", run={"steps": 3, "dir": base / "run"}, optim={"learning_rate": 1e-2}
    )
    assert len(result.losses) == result.summary["steps"] == 3 and result.losses[-1] < result.losses[0]
    assert result.run_dir == base / "run" and result.summary["world_size"] == world.size
    again = odc_mpi.prepare([str(text)], str(base / "data.h5"), vocab_size=270, eval_fraction=0.2)
    assert again.elapsed_s is None and again.num_sequences == report.num_sequences


def test_all_ranks_get_the_summary_of_rank_0(world, base, dataset_path):
    """Of a new run, of one that resumes, of a complete one, and of one that begins with the checkpoint of another."""
    settings = asdict(configure(dataset_path))

    def train(name, steps, **changes):
        run = {"dir": base / name, "steps": steps, "threads": 1, "checkpoint_every": 2, **changes}
        result = odc_mpi.train(**settings | {"run": run}, world=world)
        assert world.gather_objects((result.summary, result.losses)) == [(result.summary, result.losses)] * world.size
        return result

    new, resumed, complete = train("a", 2), train("a", 5), train("a", 5)
    assert [each.summary["steps"] for each in (new, resumed, complete)] == [2, 5, 5]
    assert resumed.summary == json.loads((base / "a" / "summary.json").read_text())
    assert complete.summary.keys() == {"steps"}
    assert len(resumed.losses) == 5 and new.losses == resumed.losses[:2] and complete.losses == resumed.losses
    other = train("b", 5, resume=str(base / "a" / "checkpoints" / f"step_{4:08}"))
    assert other.summary["steps"] == 1 and other.losses == pytest.approx(resumed.losses[4:])


def test_the_losses_are_those_of_the_command(world, base, dataset_path):
    config = configure(dataset_path, **{"run.dir": base / "command"})
    lines, _ = train_to_the_end(config, world)
    settings = asdict(config)
    settings["run"] = {key: value for key, value in settings["run"].items() if key != "num_train_epochs"}
    result = odc_mpi.train(**settings | {"run": settings["run"] | {"dir": base / "script"}}, world=world)
    assert result.losses == pytest.approx([line["loss"] for line in lines], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run": {"step": 5}}, "odc_mpi.train: unknown setting run.step: "),
        ({"optim": {"learning_rate": "fast"}}, "odc_mpi.train: optim.learning_rate: expected "),
        ({"data": "/nowhere.h5"}, "expected a data set at ./nowhere.h5"),
    ],
)
def test_a_wrong_setting_is_raised_on_every_rank_and_nothing_is_written(world, base, dataset_path, settings, words):
    given = {"model": {"config": QWEN2}, "data": dataset_path, "run": {"dir": base}} | settings
    with pytest.raises(AllRanksUserError, match=words):
        odc_mpi.train(**given)
    assert not base.exists()
    with pytest.raises(UserError, match="expected fields of PrepareOptions, got max_lenght"):
        odc_mpi.prepare("stdlib", base / "x.h5", max_lenght=100, world=world)
    with pytest.raises(AllRanksUserError, match="--max-length"):
        odc_mpi.prepare("stdlib", base / "x.h5", max_length=1, world=world)
