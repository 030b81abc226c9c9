"""Adapters whose base lies elsewhere by now: the run goes on over it, it is exported over it, and only over it."""

import json
import shutil

import huggingface_hub
import pytest
import small_training
import torch
from test_adapter_training import configure, losses_in
from test_adapter_training import saved as saved  # a fixture

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.cli.main import main
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.models.load import load_model
from odc_mpi.training.train import train

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]


@pytest.fixture(scope="session")
def shared_dir(world, tmp_path_factory):
    """A directory of these tests alone, so that their run is none of another file's."""
    return world.gather_objects(tmp_path_factory.mktemp("moved"))[0]


@pytest.fixture
def moved(world, saved):
    """The run, the directory in which its base is now, and its settings with that directory."""
    run_dir, base, settings = saved
    place = base.with_name("moved")
    if world.rank == 0:
        base.rename(place)
    world.gather_objects(None)
    yield run_dir, place, settings | {"model.path": place, "run.steps": 3}
    world.gather_objects(None)
    if world.rank == 0:
        place.rename(base)
    world.gather_objects(None)


def trained(meta_model):
    return meta_model.weights.read("model.layers.1.mlp.up_proj.lora_B.default.weight", 0, 8)


def test_the_run_goes_on_over_it_and_remembers_the_place(world, moved, dataset_path, shared_dir):
    run_dir, place, settings = moved
    copy = shared_dir / "copy"
    if world.rank == 0:
        shutil.copytree(run_dir, copy)
    world.gather_objects(None)
    with pytest.raises(AllRanksUserError, match=rf"model.path: .*{place.with_name('base')} has none"):
        train(configure(dataset_path, **settings | {"run.dir": copy, "model.path": place.with_name("base")}), world)
    train(configure(dataset_path, **settings | {"run.dir": copy, "run.checkpoint_every": 3}), world)
    world.gather_objects(None)
    assert len(losses_in(copy)) == 3
    with open_newest_checkpoint(copy) as checkpoint:
        assert checkpoint.manifest.step == 3 and checkpoint.manifest.metadata["base"]["path"] == str(place)


def test_it_is_exported_over_it(world, moved, tmp_path, capsys, monkeypatch):
    run_dir, place, _ = moved
    if world.rank:
        return
    with pytest.raises(UserError, match=rf"base model in {place.with_name('base')}, found .*with --base"):
        load_model(run_dir)
    for more, name in (((), "adapters"), (("--merge",), "merged")):
        export = ["export", str(run_dir), "--out", str(tmp_path / name), *more]
        assert main([*export, "--base", str(place)]) == 0
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(place), None)
    expected = trained(load_model(run_dir, base=place))
    assert expected.abs().min() > 0
    assert torch.equal(trained(load_model(tmp_path / "adapters")), expected)
    snapshot = tmp_path / "models--Owner--Base" / "snapshots" / ("0123456789" * 4)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(place)
    assert main(["export", str(run_dir), "--out", str(tmp_path / "named"), "--base", str(snapshot)]) == 0
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("Owner/Base", snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(trained(load_model(tmp_path / "named")), expected)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "merged"), "--out", str(tmp_path / "x"), "--base", str(place)]) == 2
    with pytest.raises(UserError, match=r"--base requires a LoRA adapter, .*merged holds a full model"):
        load_model(tmp_path / "merged", base=place)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]),
         "safetensors differs: set model.path"),
        ("config.json", lambda content: content.replace(b"1e-06", b"1e-05"), r"with rms_norm_eps 1e-06, got 1e-05 in"),
    ],
)  # fmt: skip
def test_another_base_in_that_place_is_refused(world, moved, tmp_path, capsys, file, change, words):
    run_dir, place, _ = moved
    other = shutil.copytree(place, tmp_path / "other")
    content = (other / file).read_bytes()
    (other / file).write_bytes(change(content))
    assert (other / file).read_bytes() != content
    with pytest.raises(UserError, match=words):
        load_model(run_dir, base=other)
    if world.rank == 0:
        assert main(["export", str(run_dir), "--out", str(tmp_path / "out"), "--base", str(other)]) == 2
        assert not (tmp_path / "out").exists()
        assert len(capsys.readouterr().err.splitlines()) == 1
    world.gather_objects(None)


def test_exported_adapters_keep_the_base_and_its_changed_configuration(
    world, dataset_path, shared_dir, tmp_path, monkeypatch, capfd
):
    """Also in another directory. The base has two matrices of values that its config.json ties."""
    base = small_training.save_model(world, shared_dir / "two", tie_word_embeddings=False)
    if world.rank == 0:
        content = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
        (base / "config.json").write_text(json.dumps(content))
    world.gather_objects(None)
    settings = {f"model.config.{key}": None for key in small_training.QWEN2} | {"model.path": "two"}
    settings |= {"model.config.tie_word_embeddings": "false", "model.config.rms_norm_eps": 1e-3}
    monkeypatch.chdir(shared_dir)
    train(configure(dataset_path, **settings, **{"run.dir": "of_two", "run.steps": 1}), world)
    world.gather_objects(None)
    if world.rank:
        return
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(shared_dir / "of_two"), "--out", "adapters"]) == 0
    assert "base_config.json" in capfd.readouterr().err
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    exported, saved = load_model(tmp_path / "adapters"), load_model(shared_dir / "of_two")
    assert exported.module.config.rms_norm_eps == 1e-3
    for name, parameter in saved.module.named_parameters():
        values = (model.weights.read(name, 0, parameter.numel()) for model in (exported, saved))
        assert torch.equal(*values), name
    with pytest.raises(UserError, match=r"set tie_word_embeddings to false in config.json there"):
        load_model(base)
