"""Training on a GPU that the ranks share: `make test-gpu`; elsewhere skipped, unless ODC_MPI_REQUIRE_GPU=1."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_training import assert_close, configure, expected, run

from odc_mpi import api
from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.comm.device.device import find_device
from odc_mpi.comm.settings import CommConfig
from odc_mpi.models.context_parallel_attention import context_parallel_attention

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 4), pytest.mark.usefixtures("gpu")]


@pytest.fixture
def exact_fp32():
    """Products in fp32 as on the host, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


#: Relative tolerances of losses: in bf16 they follow those of the fp32 run.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


def assert_trains_as_plain_torch(world, dataset_path, changes):
    dataset, metrics, state = run(configure(dataset_path, **changes), world)
    losses, parameters = expected(configure(dataset_path), dataset)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=TOLERANCES[changes["model.param_dtype"]])
    assert {tensor.device.type for tensor in state.values()} == {"cuda"}
    if changes["model.param_dtype"] == "float32":
        on_host = {name: tensor.cpu() for name, tensor in state.items()}
        for name, wanted in parameters.items():
            torch.testing.assert_close(on_host[name], wanted, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
@pytest.mark.parametrize("zero_copy", ["auto", "off"])
@pytest.mark.parametrize("optimizer", ["cpu", "cuda"])
@pytest.mark.parametrize("param_dtype", TOLERANCES)
def test_losses_and_parameters_equal_a_plain_loop(
    world, dataset_path, exact_fp32, reduction, zero_copy, optimizer, param_dtype
):
    changes = {"comm.zero_copy": zero_copy, "optim.device": optimizer}
    changes |= {"comm.reduction": reduction, "comm.window_device": "cpu"}
    changes |= {"run.device": "cuda", "data.balance": "lb_mini", "model.param_dtype": param_dtype}
    assert_trains_as_plain_torch(world, dataset_path, changes)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetching_and_recomputing_change_nothing(world, dataset_path, exact_fp32, prefetch):
    changes = {"run.device": "cuda", "comm.window_device": "cpu", "comm.prefetch": prefetch}
    _, metrics, state = run(configure(dataset_path, **changes), world)
    changes["model.gradient_checkpointing"] = "true"
    _, again, repeated = run(configure(dataset_path, **changes), world)
    assert [m["loss"] for m in again] == pytest.approx([m["loss"] for m in metrics], rel=1e-5)
    assert_close(repeated, state)


@pytest.mark.sizes(1)
@pytest.mark.timeout(300)  # it compiles
@pytest.mark.filterwarnings("ignore")  # of peft, Dynamo and inductor
def test_compiling_layers_with_adapters_changes_nothing_on_a_gpu(world, dataset_path):
    changes = {"run.device": "cuda", "model.param_dtype": "bfloat16", "model.gradient_checkpointing": "true"}
    changes |= {"lora.r": 4, "lora.alpha": 16, "optim.warmup_steps": None}
    losses = [[step["loss"] for step in run(configure(dataset_path, **changes), world)[1]]]
    torch._dynamo.reset()
    changes["model.compile"] = "true"
    losses.append([step["loss"] for step in run(configure(dataset_path, **changes), world)[1]])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCES["bfloat16"])
    assert losses[0][-1] != losses[0][0]


def attend(inputs, upstream, attention):
    """Output and gradients, in fp64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = attention(*leaves)
    return [x.detach().double() for x in (output, *torch.autograd.grad(output, leaves, upstream))]


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("shared", [True, False], ids=["in_place", "gets"])
@pytest.mark.parametrize("size", [20, 64, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_attention_is_that_of_whole_sequences_in_fp64(world, exact_fp32, shared, size, dtype):
    """Each array by its norm. Rows of 20 are padded; FlashAttention takes no rows of 320."""
    tokens, heads, groups = 3000, 8, 2
    device = find_device("cuda", world.host_rank)
    generator = torch.Generator().manual_seed(size)
    shapes = [(1, n, tokens, size) for n in (heads, groups, groups, heads)]
    *inputs, upstream = (torch.randn(shape, generator=generator).to(device.torch_device, dtype) for shape in shapes)
    whole = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    exact = attend([x.double() for x in inputs], upstream.double(), whole)
    bounds = [tokens * i // world.size for i in range(world.size + 1)]
    tokens_of_chunk = slice(*bounds[world.rank : world.rank + 2])
    windows = KVWindows(world, KVSizes(1, 2 * groups * size * 4, tokens, tokens), shared=shared, device=device)
    assert windows._pinned is not None
    for number in (1, 2):  # the second one reuses the slots
        with WindowKVExchange(windows, number, bounds, range(world.size), "a sequence") as exchange:
            chunk = attend(
                [x[:, :, tokens_of_chunk] for x in inputs],
                upstream[:, :, tokens_of_chunk],
                lambda *states, exchange=exchange: context_parallel_attention(*states, None, 0, exchange),
            )
        for name, part, wanted in zip("oqkv", chunk, exact, strict=True):
            distance = (part - wanted[:, :, tokens_of_chunk]).norm() / wanted[:, :, tokens_of_chunk].norm()
            assert distance < (1e-5 if dtype == torch.float32 else 2e-2), (name, number, distance)
    windows.close()


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("changes", [{}, {"comm.zero_copy": "off", "model.gradient_checkpointing": "true"}])
@pytest.mark.parametrize("param_dtype", TOLERANCES)
def test_split_sequences_train_as_whole_ones(world, dataset_path, exact_fp32, changes, param_dtype):
    """Of up to 40 tokens, in chunks of at most 20."""
    settings = {"run.device": "cuda", "comm.window_device": "cpu", "model.param_dtype": param_dtype} | changes
    settings |= {"data.balance": "dynamic"}
    _, metrics, state = run(configure(dataset_path, **settings), world)
    settings |= {"data.context_parallel": "auto", "data.max_tokens_per_microbatch": 20}
    dataset, split, parameters = run(configure(dataset_path, **settings), world)
    assert sum(m["num_cut_sequences"] for m in split) > 0
    losses, _ = expected(configure(dataset_path), dataset)
    assert [m["loss"] for m in split] == pytest.approx(losses, rel=TOLERANCES[param_dtype])
    exact = param_dtype == "float32"
    tolerance = 1e-5 if exact else TOLERANCES[param_dtype]
    assert [m["loss"] for m in split] == pytest.approx([m["loss"] for m in metrics], rel=tolerance)
    for name, wanted in state.items():
        difference = (parameters[name].float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-3)
        assert difference < (1e-4 if exact else 0.2), (name, difference)


@pytest.fixture
def window_device(world):
    """A device that can have windows; CuPy is there where device windows are to be tested."""
    pytest.importorskip("cupy")
    return find_device("cuda", world.local_rank)


def test_window_memory_is_what_torch_sees(window_device):
    memory = window_device.empty_for_windows(1 << 20)
    assert (memory.device, memory.dtype, memory.numel()) == (window_device.torch_device, torch.uint8, 1 << 20)
    before = torch.cuda.memory_allocated()
    other = window_device.empty_for_windows(1 << 22)
    assert torch.cuda.memory_allocated() == before, "not torch's"
    other.view(torch.float32).fill_(2.0)
    window_device.record_event().synchronize()
    assert other.view(torch.float32).sum().item() == 2 << 20


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])
@pytest.mark.parametrize("optimizer", ["cpu", "cuda"])
@pytest.mark.parametrize("param_dtype", TOLERANCES)
def test_windows_on_the_gpu_give_what_a_plain_loop_does(
    world, dataset_path, exact_fp32, window_device, prefetch, reduction, optimizer, param_dtype
):
    decision = api.decide_for(world, CommConfig(reduction=reduction), device="cuda")
    if decision.window_device.value != "cuda":
        pytest.skip(decision.window_device.reason)  # `make test-gpu` has asked the doctor before
    changes = {"comm.window_device": "auto", "comm.reduction": reduction, "comm.prefetch": prefetch}
    changes |= {"run.device": "cuda", "optim.device": optimizer, "data.balance": "lb_mini"}
    assert_trains_as_plain_torch(world, dataset_path, changes | {"model.param_dtype": param_dtype})
