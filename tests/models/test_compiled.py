import pytest
import torch
from packed_models import materialized
from tiny_qwen2 import SIZES
from torch._dynamo.testing import CompileCounter
from user_errors import refused

from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.models import build as models
from odc_mpi.models import compiled
from odc_mpi.models.adapters.add import add_adapters

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it


@pytest.fixture(autouse=True)
def _reset_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend(monkeypatch):
    """A backend that counts the graphs, and runs them as they are."""
    monkeypatch.setattr(compiled, "BACKEND", counter := CompileCounter())
    return counter


def model(num_layers, **settings):
    settings = SIZES | {"model_type": "llama", "num_hidden_layers": num_layers} | settings
    return materialized(models.from_config(settings, seed=3)).requires_grad_()


def loss(module, lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(0, SIZES["vocab_size"], (sum(lengths),), generator=generator)
    logits = module(**packed_inputs(tokens.numpy(), lengths)).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[1:])


LENGTHS = ((5, 9), (11,), (3, 4, 5))
#: Graphs per layer: four around its attention and one around those, first for one length, then for any.
NUM_GRAPHS = 10


def assert_same_training(num_layers, rtol, atol):
    """Losses and gradients are those of the same model without compilation."""
    plain, module = model(num_layers), model(num_layers)
    compiled.compile_layers(module)
    for lengths in LENGTHS:
        ours, wanted = loss(module, lengths), loss(plain, lengths)
        torch.testing.assert_close(ours, wanted, rtol=rtol / 10, atol=0)
        ours.backward()
        wanted.backward()
    for (name, ours), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=rtol, atol=atol, msg=name)
    return module


def test_layers_and_lengths_share_graphs_and_compute_as_before_and_the_twin_keeps_no_parameters(backend):
    module = assert_same_training(2, rtol=0, atol=0)
    assert 0 < backend.frame_count <= NUM_GRAPHS
    twin = module.model.layers[0].forward._twin
    assert list(twin.parameters()) == []
    assert twin.mlp.down_proj is not module.model.layers[0].mlp.down_proj
    assert twin.mlp.config is module.model.layers[0].mlp.config


def test_generation_is_not_compiled(backend):
    """Its cache grows with every token."""
    module = model(2).eval()
    module.config._attn_implementation = "sdpa"
    compiled.compile_layers(module)
    wanted = model(2).eval()
    wanted.config._attn_implementation = "sdpa"
    prompt = torch.tensor([[1, 2, 3]])
    ours = module.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
    assert ours.tolist() == wanted.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True).tolist()
    assert backend.frame_count == 0


def test_missing_parts_of_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused("a C++ compiler... no-such-compiler: install ... set model.compile to", compiled.compile_layers, model(1))
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
    refused("Python headers... no ...Python.h: install ..., or set model.compile to", compiled.compile_layers, model(1))


def test_a_model_without_layers(backend):
    refused("expected a model with layers, got Linear without any", compiled.compile_layers, torch.nn.Linear(2, 2))


def test_adapters_of_experts(backend):
    settings = {"r": 2, "lora_alpha": 2, "lora_dropout": 0, "target_modules": "all-linear", "modules_to_save": None}
    mixtral = models.from_config(SIZES | {"model_type": "mixtral", "num_local_experts": 4}, 0)
    adapted = add_adapters(mixtral, settings, 0, torch.float32).module
    refused("adapters of fused experts cannot be compiled: set it to false", compiled.compile_layers, adapted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in what inductor imports
def test_inductor_gives_the_same_losses_and_gradients(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert_same_training(2, rtol=1e-4, atol=1e-5)
