"""Adapters of fused experts and of some layers: losses and weights of peft, exports, and what is fetched."""

import pytest
from test_adapter_training import assert_trained_alike, configure, reference, run

from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.run import build_trainer, decide

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(1, 2, 3),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # of peft itself
]

MIXTRAL = {"model.config.model_type": "mixtral", "model.config.num_local_experts": 4}
GRANITE = MIXTRAL | {"model.config.model_type": "granitemoe"}
QWEN3 = {
    "model.config.model_type": "qwen3_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 24,
    "model.config.mlp_only_layers": "[0]",
}
NO_CACHE = {"comm.zero_copy": "off", "comm.parameter_cache_bytes": 0}
RECOMPUTED = NO_CACHE | {"model.gradient_checkpointing": "true"}
EXPERTS = "[mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight]"


@pytest.mark.parametrize(
    ("model", "changes", "num_adapters"),
    [
        (MIXTRAL, {}, 3 * (4 + 3)),  # peft adds experts and the router itself
        (QWEN3, {"lora.target_modules": "[q_proj]", "lora.target_parameters": EXPERTS} | NO_CACHE, 3 + 2 * 3),
        (GRANITE, {"lora.target_modules": "[]", "lora.target_parameters": "[experts.gate_up_proj]"} | RECOMPUTED, 3),
    ],
    ids=["mixtral, all linear", "qwen3 with router", "granite, recomputed"],
)
def test_experts_train_as_in_peft(world, dataset_path, model, changes, num_adapters):
    config = configure(dataset_path, **model, **changes, **{"data.balance": "lb_mini"})
    inputs, losses, first, state = run(config, world)
    wanted, trained = reference(config, inputs, first)
    assert len(trained) == 2 * num_adapters
    assert losses == pytest.approx(wanted, abs=2e-5)
    assert_trained_alike(state, trained, 1e-4, 1e-5)
    assert all(not state[name].equal(first[name]) for name in trained)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_before_the_first_adapter_have_no_backward(world, dataset_path, prefetch, checkpointing):
    """Adapters in the last of 8 layers: 10 of 16 fetches; the last layer stays from its forward to its backward."""
    counts = {}
    for layers in (None, "[6,7]"):
        changes = {"model.config.num_hidden_layers": 8, "comm.prefetch": prefetch, "run.steps": 2} | NO_CACHE
        changes |= {"lora.target_modules": "[q_proj,v_proj]", "lora.layers_to_transform": layers}
        changes |= {"model.gradient_checkpointing": checkpointing}
        config = configure(dataset_path, **changes)
        inputs = open_inputs(config, world.rank, world.size)
        trainer = build_trainer(config, world, inputs, decide(config, world))
        calls = []
        trainer.model.traffic.add_fetch = calls.append
        for _ in range(2):
            calls.clear()
            trainer.step()
        names = [trainer.model.layouts[i].name for i in calls]
        counts[layers] = names
        if world.rank == 0:
            print(layers, [n.replace("model.layers.", "") for n in names])
        world.gather_objects(None)
        trainer.model.close()
