"""A base in 4 bits: what a run with adapters over it exports, and that it goes on only over the same bytes."""

import json

import pytest
import small_training
import torch
import torch_reference
import transformers
from small_training import configure

from odc_mpi.api import shard_model
from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.cli.main import main
from odc_mpi.errors import AllRanksUserError
from odc_mpi.generation.generate import SamplingParams, generate
from odc_mpi.models.decoding import Prompt, unsharded_if_fits
from odc_mpi.models.load import load_model
from odc_mpi.training.train import train

peft = pytest.importorskip("peft")
functional = pytest.importorskip("bitsandbytes.functional")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]
TOKENS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory, request):
    """The directory of a base in float32, and the settings and directory of a run over it in 4 bits."""
    folder = world.gather_objects(tmp_path_factory.mktemp("quantized"))[0]
    base = small_training.save_model(world, folder / "base", hidden_size=64, intermediate_size=128)
    settings = {"model.path": base, "model.load_in_4bit": True, "lora.r": 4, "lora.alpha": 64}
    settings |= {"data.path": request.getfixturevalue("dataset_path"), "run.dir": folder / "run"}
    train(configure(settings.pop("data.path"), **settings), world)
    return base, settings


def quantized(base):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return torch_reference.in_4_bits(model, base.with_name("float"), torch.float32)


def test_exported_adapters_fit_the_base_in_peft_and_merging_adds_them_to_its_values(world, run, capsys):
    base, run_dir = run[0], run[1]["run.dir"]
    out, merged = run_dir / "out", run_dir / "merged"
    if world.rank == 0:
        assert main(["export", str(run_dir), "--out", str(out)]) == 0
        assert "load the base with BitsAndBytesConfig" in capsys.readouterr().err
        assert main(["export", str(run_dir), "--out", str(merged), "--merge", "--dtype", "float32"]) == 0
        plain = quantized(base)
        before = plain(TOKENS).logits
        adapted = peft.PeftModel.from_pretrained(plain, out).train()
        wanted = adapted(TOKENS).logits
        assert (wanted - before).abs().max() > 1e-2, "the adapters do something"
        whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
        assert "quantization_config" not in json.loads((merged / "config.json").read_text())
        torch.testing.assert_close(whole(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)
        layer = adapted.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
        delta = 16 * layer.lora_B.default.weight @ layer.lora_A.default.weight
        values = functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state)
        torch.testing.assert_close(whole.model.layers[1].mlp.up_proj.weight, values + delta)
    world.gather_objects(None)


def test_completions_of_a_run_are_those_of_the_merged_model(world, run):
    run_dir = run[1]["run.dir"]
    merged = run_dir / "for_completions"
    if world.rank == 0:
        assert main(["export", str(run_dir), "--out", str(merged), "--merge", "--dtype", "float32"]) == 0
    world.gather_objects(None)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
    completion = whole.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False)[0, 12:].tolist()
    meta_model = load_model(run_dir, world.rank, world.size)
    model = shard_model(meta_model.module, world, weights=meta_model.weights).eval()
    with unsharded_if_fits(model):
        assert generate(model.module, Prompt(0, tuple(range(12)), ()), SamplingParams(max_new_tokens=8)).tokens == (
            completion
        )
    world.gather_objects(None)
    model.close()


def test_a_run_goes_on_over_the_same_bytes_only(world, run, dataset_path, shared_dir):
    settings = dict(run[1])
    more = configure(dataset_path, **settings | {"run.steps": 7})
    assert train(more, world)["steps"] == 7
    own = {**settings, "model.path": settings["run.dir"], "run.dir": shared_dir / "own", "run.steps": 2}
    started = train(configure(dataset_path, **own), world)
    del own["model.load_in_4bit"]  # a run that starts from adapters takes their base as it was
    assert (
        train(configure(dataset_path, **own | {"run.dir": shared_dir / "same"}), world)["loss_last"]
        == (started["loss_last"])
    )
    with open_newest_checkpoint(settings["run.dir"]) as checkpoint:
        record = checkpoint.manifest.metadata["base"]
    assert record["quantization"]["bnb_4bit_quant_type"] == "nf4" and record["quantization"]["bitsandbytes"]
    assert {"model.layers.0.mlp.up_proj", "model.safetensors:0"} <= record["sha256"].keys()
    other = configure(dataset_path, **settings | {"run.steps": 9, "model.bnb_4bit_quant_type": "fp4"})
    with pytest.raises(
        AllRanksUserError, match=r"model: expected .* nf4, .*, got .* fp4, .*: change model.load_in_4bit"
    ):
        train(other, world)
    del settings["model.load_in_4bit"]
    with pytest.raises(AllRanksUserError, match=r"model: expected .* dtype float32, got none"):
        train(configure(dataset_path, **settings | {"run.steps": 9}), world)
