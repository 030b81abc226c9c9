"""Training on a GPU that the ranks share: `make test-gpu`; elsewhere skipped, unless ODC_MPI_REQUIRE_GPU=1."""

import os

import pytest
import torch
from test_parity import assert_close, configure, expected, run

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        required = os.environ.get("ODC_MPI_REQUIRE_GPU") == "1"
        (pytest.fail if required else pytest.skip)(f"torch {torch.__version__} sees no GPU")


@pytest.fixture
def exact_fp32():
    """Products in fp32 as on the host, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("transport", ["window", "collective"])
@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
@pytest.mark.parametrize("zero_copy", ["auto", "off"])
@pytest.mark.parametrize("optimizer", ["cpu", "cuda"])
def test_losses_and_parameters_equal_a_plain_loop(
    world, dataset_path, exact_fp32, transport, reduction, zero_copy, optimizer
):
    changes = {"comm.transport": transport, "comm.zero_copy": zero_copy, "optim.device": optimizer}
    if transport == "window":
        changes["comm.reduction"] = reduction
    elif reduction != "accumulate" or zero_copy != "auto":
        pytest.skip("collectives have no such choice")
    config = configure(dataset_path, **{"run.device": "cuda", "data.balance": "lb_mini"} | changes)
    dataset, metrics, state = run(config, world)
    losses, parameters = expected(configure(dataset_path), dataset)
    assert [m.loss for m in metrics] == pytest.approx(losses, rel=1e-4)
    assert {tensor.device.type for tensor in state.values()} == {"cuda"}
    on_host = {name: tensor.cpu() for name, tensor in state.items()}
    for name, wanted in parameters.items():
        torch.testing.assert_close(on_host[name], wanted, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetching_and_recomputing_change_nothing(world, dataset_path, exact_fp32, prefetch):
    changes = {"run.device": "cuda", "comm.prefetch": prefetch}
    _, metrics, state = run(configure(dataset_path, **changes), world)
    changes["model.gradient_checkpointing"] = "true"
    _, again, repeated = run(configure(dataset_path, **changes), world)
    assert [m.loss for m in again] == pytest.approx([m.loss for m in metrics], rel=1e-5)
    assert_close(repeated, state)


def test_bf16_follows_the_fp32_run(world, dataset_path):
    config = configure(dataset_path, **{"run.device": "cuda", "model.param_dtype": "bfloat16"})
    dataset, metrics, _ = run(config, world)
    losses, _ = expected(configure(dataset_path), dataset)
    assert [m.loss for m in metrics] == pytest.approx(losses, rel=2e-2)
