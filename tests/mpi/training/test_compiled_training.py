"""Compiled layers over windows: the losses and parameters of a plain loop, with units that come and go."""

import pytest
import test_adapter_training as adapters
import torch
from small_training import assert_close, configure, expected, run

from odc_mpi.models import compiled

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
    pytest.mark.timeout(300),  # it compiles C++
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo looks at it
]


@pytest.fixture(autouse=True)
def _reset_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_compiled_layers(world, dataset_path, monkeypatch, checkpointing):
    """As inductor traces and saves, without its kernels, which take a minute to make."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = configure(
        dataset_path,
        **{"model.compile": "true", "model.gradient_checkpointing": checkpointing},
        **{"comm.zero_copy": "off", "comm.parameter_cache_bytes": 0, "run.steps": 3},
    )
    dataset, metrics, state = run(config, world)
    losses, parameters = expected(config, dataset)
    assert [step["loss"] for step in metrics] == pytest.approx(losses, rel=1e-5)
    assert_close(state, parameters)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft itself
def test_compiled_layers_with_adapters(world, dataset_path, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = adapters.configure(
        dataset_path,
        **{"model.compile": "true", "comm.zero_copy": "off", "comm.parameter_cache_bytes": 0, "run.steps": 3},
    )
    inputs, losses, _, state = adapters.run(config, world)
    wanted, trained = adapters.reference(config, inputs)
    assert losses == pytest.approx(wanted, rel=1e-5)
    adapters.assert_trained_alike(state, trained)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
