"""Adapters of fused experts and of some layers: exports, and what is fetched."""

import peft
import pytest
import small_training
import torch
import transformers
from test_adapter_training import configure

from odc_mpi.api import shard_model
from odc_mpi.cli.main import main
from odc_mpi.generation.generate import SamplingParams, generate
from odc_mpi.models.decoding import Prompt, unsharded_if_fits
from odc_mpi.models.load import load_model
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.start.run_info import startup_lines
from odc_mpi.training.train import train

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2, 3),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # of peft itself
]

GRANITE = {"model.config.model_type": "granitemoe", "model.config.num_local_experts": 4}
QWEN3 = {
    "model.config.model_type": "qwen3_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 24,
    "model.config.mlp_only_layers": "[0]",
}
NO_CACHE = {"comm.zero_copy": "off", "comm.parameter_cache_bytes": 0}
EXPERTS = "[mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight]"


@pytest.mark.sizes(2)
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_layers_before_the_first_adapter_are_not_fetched_again(world, dataset_path, checkpointing):
    """Adapters in the last quarter of 8 layers; the last two layers stay from their forward to their backward."""
    fetched = {}
    for layers in ("[0]", "[6,7]"):
        changes = {"model.config.num_hidden_layers": 8, "model.gradient_checkpointing": checkpointing}
        changes |= {"lora.target_modules": "[q_proj,v_proj]", "lora.layers_to_transform": layers, "comm.prefetch": 0}
        config = configure(dataset_path, **changes, **NO_CACHE)
        inputs = open_inputs(config, world.rank, world.size)
        with small_training.training(config, world, inputs) as (trainer, _):
            store, found = trainer.model._transport.parameters, []
            fetch = store.fetch
            store.fetch = lambda index, fetch=fetch, found=found: found.append(index) or fetch(index)
            trainer.step()
            of_layers = [unit.indices[-1] for unit in trainer.model.units if not unit.is_root]  # their base parameters
        fetched[layers] = [of_layers.index(index) for index in found if index in of_layers]
    num_microbatches = fetched["[0]"].count(5) // 2
    assert num_microbatches >= 2
    assert fetched["[6,7]"] == [*range(8)] * num_microbatches
    assert len(fetched["[6,7]"]) <= 0.63 * len(fetched["[0]"])


@pytest.mark.sizes(1)
def test_the_start_names_weights_that_all_linear_left_out(world, dataset_path):
    config = configure(dataset_path, **GRANITE)
    inputs, decision = open_inputs(config, 0, 1), decide(config, world)
    context = RunContext(config, world, inputs=inputs, decision=decision)
    trainer = build_trainer(context)
    experts = "block_sparse_moe.experts"
    line = f"all-linear left out: block_sparse_moe.router.weight, {experts}.gate_up_proj, {experts}.down_proj"
    assert f"lora    {line} (set lora.target_parameters)" in startup_lines(context)
    trainer.model.close()


@pytest.mark.sizes(2)
def test_peft_loads_adapters_of_experts_and_merging_gives_the_same(world, shared_dir, dataset_path):
    """The logits and completions of the exported adapters in peft, of the merged model, and of the run itself."""
    model = {key.removeprefix("model.config."): value for key, value in QWEN3.items()} | {"mlp_only_layers": [0]}
    base, run_dir = small_training.save_model(world, shared_dir / "experts", **model), shared_dir / "expert_adapters"
    settings = {"model.path": base, "run.dir": run_dir, "lora.target_parameters": EXPERTS, "data.balance": "lb_mini"}
    train(configure(dataset_path, **settings), world)
    out, merged = run_dir / "out", run_dir / "merged"
    tokens = torch.arange(12)[None]
    if world.rank == 0:
        assert main(["export", str(run_dir), "--out", str(out)]) == 0
        assert main(["export", str(run_dir), "--out", str(merged), "--merge"]) == 0
        assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    world.gather_objects(None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = plain(tokens).logits
    adapted = peft.PeftModel.from_pretrained(plain, out).eval()
    wanted = adapted(tokens).logits
    assert (wanted - before).abs().max() > 1e-2, "the adapters do something"
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-5)
    completion = adapted.generate(input_ids=tokens, max_new_tokens=8, do_sample=False)[0, 12:].tolist()
    for path in (run_dir, out):
        meta_model = load_model(path, world.rank, world.size)
        model = shard_model(meta_model.module, world, weights=meta_model.weights).eval()
        prompt = Prompt(0, tuple(range(12)), ())
        assert generate(model.module, prompt, SamplingParams(max_new_tokens=8)).tokens == completion
        with unsharded_if_fits(model):
            assert generate(model.module, prompt, SamplingParams(max_new_tokens=8)).tokens == completion
        world.gather_objects(None)
        model.close()
