"""4-bit weights: bytes and values of bitsandbytes, products with them, and directories that store them."""

import json
import shutil

import pytest
import torch
import torch_reference
from packed_models import materialized
from safetensors.torch import load_file, save_file
from tiny_qwen2 import QWEN2
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from user_errors import refused

from odc_mpi.models import build
from odc_mpi.models.load import load_model
from odc_mpi.models.quantization import linear
from odc_mpi.models.quantization.library import cpu_kernel
from odc_mpi.models.quantization.linear import SCALES, QuantizedLinear, hidden_numel, linear_layers
from odc_mpi.models.quantization.quantize import SETTINGS, QuantizingWeights, quantize
from odc_mpi.training import settings as configuration
from odc_mpi.training.inputs import _with_adapters

functional = pytest.importorskip("bitsandbytes.functional")

#: Rows of multiples of 64: on CPUs, bitsandbytes 0.50 dequantizes others wrongly.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
DEFAULTS = dict(zip(SETTINGS, ("nf4", True), strict=True))


def quantized_layer(weight, bias=None, quant_type="nf4", double_quant=True):
    """A quantized layer in memory, and its source of weights."""
    module = nn.ModuleDict({"x": nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")})
    options = {"quant_type": quant_type, "double_quant": double_quant, "stored_dtype": weight.dtype}
    module["x"] = layer = QuantizedLinear(module["x"], **options)

    class Weights:
        def read(self, name, start, stop):
            return weight.view(-1)[start:stop]

    source = QuantizingWeights(Weights(), module)
    for name in ("weight", SCALES):
        parameter = getattr(layer, name)
        values = source.read(f"x.{name}", 0, parameter.numel()).view(parameter.shape)
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    layer.bias = bias and nn.Parameter(torch.randn(len(weight)), requires_grad=False)
    return layer


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def has_kernel(request, monkeypatch):
    """With the kernel of bitsandbytes, or by torch."""
    assert cpu_kernel() is not None
    if not request.param:
        monkeypatch.setattr(linear, "cpu_kernel", lambda: None)


@pytest.mark.usefixtures("has_kernel")
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 64), (48, 64), (320, 192), (700, 512)])
def test_bytes_and_values_are_those_of_bitsandbytes(shape, dtype, quant_type, double_quant):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = quantized_layer(weight, quant_type=quant_type, double_quant=double_quant)
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double_quant, quant_type=quant_type
    )
    assert layer.weight.data.equal(packed)
    for wanted in (torch.float32, torch.bfloat16):
        values = layer.dequantize(layer.weight, layer.weight_scales, wanted)
        assert values.equal(functional.dequantize_4bit(packed, state).to(wanted))
    assert layer.num_bytes + hidden_numel(layer) == weight.numel()


@pytest.mark.usefixtures("has_kernel")
def test_rows_of_any_length_are_dequantized():
    weight = torch.randn(32, 40)
    layer = quantized_layer(weight, double_quant=False)
    blocks = layer.dequantize(layer.weight, layer.weight_scales, torch.float32).view(-1, 64)
    largest = weight.view(-1, 64).abs().amax(1, keepdim=True)
    assert ((blocks - weight.view(-1, 64)).abs() <= 0.16 * largest).all()  # half of the widest gap of nf4
    assert blocks.abs().amax(1, keepdim=True).equal(largest)


def test_a_product_saves_bytes_and_has_the_gradient_of_the_dequantized_weight():
    layer, saved = quantized_layer(torch.randn(48, 64), bias=True), []
    x = torch.randn(3, 5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x).square().sum().backward()
    assert {(t.dtype, t.numel()) for t in saved if t.numel() != 3 * 5 * 48} == {
        (torch.uint8, 48 * 32), (torch.uint8, layer.weight_scales.numel())
    }  # fmt: skip
    gradient, x.grad = x.grad, None
    weight = layer.dequantize(layer.weight, layer.weight_scales, torch.float32)
    nn.functional.linear(x, weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad)


def test_the_head_is_not_quantized_and_odd_sizes_are_refused():
    names = linear_layers(build.from_config(QWEN2, 0).module)
    assert len(names) == 2 * 7 and "lm_head" not in names
    odd = build.from_config(QWEN2 | {"hidden_size": 36, "intermediate_size": 33, "head_dim": 16}, 0)
    refused(
        "multiple of 64 weights, got model.layers.0.mlp.gate_proj with 1188", quantize, odd, DEFAULTS, torch.float32
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A directory with 4-bit weights of transformers, and its logits."""
    path = tmp_path_factory.mktemp("stored")
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN2 | SIZES))
    model = torch_reference.in_4_bits(model, path / "float", torch.bfloat16)
    model.save_pretrained(path / "in_4_bits")
    return path / "in_4_bits", model(torch.arange(9)[None]).logits


def test_logits_of_a_stored_model_are_those_of_transformers(stored):
    module = materialized(load_model(stored[0]))
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.data = parameter.bfloat16()
    assert module(torch.arange(9)[None]).logits.equal(stored[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq"}, "expected quant_method bitsandbytes (4 bits by bitsandbytes), got gptq"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "expected load_in_4bit True...got False"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "expected bnb_4bit_quant_storage uint8...got bfloat16"),
        (None, "expected 4-bit weights, as config.json says, found none"),
    ],
)
def test_other_formats_are_refused(stored, tmp_path, changes, words):
    path = shutil.copytree(stored[0], tmp_path / "copy")
    config = json.loads((path / "config.json").read_text())
    if changes is None:
        save_file({n: t for n, t in load_file(path / "model.safetensors").items() if "quant_state" not in n},
                  path / "model.safetensors")  # fmt: skip
    config["quantization_config"] |= changes or {}
    (path / "config.json").write_text(json.dumps(config))
    refused(f"model.path: ...{words}", load_model, path)


def test_scales_of_a_wrong_size_are_refused(stored, tmp_path):
    path = shutil.copytree(stored[0], tmp_path / "copy")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    save_file(tensors | {f"{name}.weight.absmax": tensors[f"{name}.weight.absmax"][:-1]}, path / "model.safetensors")
    refused(f"the stored scales of {name} have a wrong size", materialized, load_model(path))


def test_training_needs_adapters_and_one_quantization(stored):
    def load(**settings):
        given = {"data.path": "x.h5", "model.path": stored[0], "model.param_dtype": "float32"} | settings
        return configuration.load(None, [f"--{key}={value}" for key, value in given.items()])

    model = load_model(stored[0])
    refused("model.path: the weights are quantized...set lora.r", _with_adapters, model, load())
    refused("model.compile: expected false", _with_adapters, model, load(**{"lora.r": 2, "model.compile": True}))
    refused("quantized already: set it to false", quantize, model, DEFAULTS, torch.float32)
    refused("model.load_in_4bit requires lora.r", load, **{"model.load_in_4bit": True})
    both = {"model.load_in_4bit": True, "lora.r": 2, "model.compile": True}
    refused("model.compile: expected false with model.load_in_4bit true, got true", load, **both)
