"""Published names and layouts: what `save_pretrained` writes is read slice by slice, and exported again."""

import itertools
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_configurations import COMPOSITES, tiny_config
from user_errors import refused

from odc_mpi.models import build as models
from odc_mpi.models.quirks.composite import find_composite
from odc_mpi.models.weights.conversion import PlacedTensor, published_tensors
from odc_mpi.models.weights.safetensors_files import SafetensorsWeights
from odc_mpi.shard.partition import replicated_persistent_tensors

FAMILIES = [
    *("llama", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"),
    *("glm4_moe", "phimoe", "granitemoe", "ernie4_5_moe", "dots1", "gpt_oss", "llama4_text", "minimax"),
]


def assert_slices(weights, reference, num_ranks=3):
    """Every parameter equals the reference in random slices, and in the equal slices of some ranks."""
    for name, wanted in reference.items():
        flat = wanted.detach().reshape(-1)
        bounds = [flat.numel() * rank // num_ranks for rank in range(num_ranks + 1)]
        slices = [*itertools.pairwise(bounds)]
        slices += [sorted(random.choices(range(flat.numel() + 1), k=2)) for _ in range(4)]
        for start, stop in slices:
            assert torch.equal(weights.read(name, start, stop).reshape(-1), flat[start:stop]), (name, start, stop)


class InMemory:
    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, name, start, stop):
        return self.tensors[name].detach().reshape(-1)[start:stop]


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_read_and_written_as_transformers_does(kind, tmp_path):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    for original in (False, True):
        directory = tmp_path / str(original)
        module.save_pretrained(directory, save_original_format=original, max_shard_size="5GB" if original else "20KB")
        assert (directory / "model.safetensors.index.json").exists() == (not original)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert_slices(SafetensorsWeights(directory, module), dict(loaded.named_parameters()))
    tensors = dict(module.named_parameters()) | dict(replicated_persistent_tensors(module))
    published = published_tensors(module, {name: tensor.shape for name, tensor in tensors.items()})
    stored = load_file(directory / "model.safetensors")
    assert published.keys() == stored.keys()
    for name, tensor in stored.items():
        values = published[name].read_range(InMemory(tensors), 0, tensor.numel())
        assert torch.equal(values.reshape(tensor.shape), tensor), name


@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_text_model_of_a_composite(kind, tmp_path):
    torch.manual_seed(0)
    config = tiny_config(kind)
    whole = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    whole.eval().save_pretrained(tmp_path)
    composite = find_composite(transformers.AutoConfig.from_pretrained(tmp_path))
    text = transformers.AutoModelForCausalLM.from_config(composite.text_config, dtype=torch.float32).eval()
    weights = SafetensorsWeights(tmp_path, text, composite)
    weights.load_buffers(text)
    for name, parameter in text.named_parameters():
        parameter.data = weights.read(name, 0, parameter.numel()).reshape(parameter.shape).clone()
    tokens = torch.arange(3, 15)[None]
    if kind == "llama4":  # transformers 5.24 cannot run the whole model
        whole = whole.language_model
    with torch.no_grad():
        torch.testing.assert_close(text(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    files = {region.source for placed in weights._placed.values() for region in placed.regions}
    assert not any("vis" in name for name in files)


def test_a_composite_without_a_text_model_is_refused():
    refused("no causal language model for its text part, blip_text_model", find_composite, transformers.BlipConfig())
    refused("grounding-dino is multimodal", find_composite, transformers.GroundingDinoConfig())


def test_a_rank_reads_only_its_slices(tmp_path, monkeypatch):
    module = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=torch.float32)
    module.save_pretrained(tmp_path)
    weights = models.from_directory(tmp_path).weights
    counts, plain = [], weights.files._slice

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def get_shape(self):
            return self.inner.get_shape()

        def __getitem__(self, index):
            counts.append(self.inner[index].numel())
            return self.inner[index]

    monkeypatch.setattr(weights.files, "_slice", lambda name: Counting(plain(name)))
    total = read = 0
    for rank in range(2):
        for name, parameter in module.named_parameters():
            half = parameter.numel() // 2
            weights.read(name, half * rank, half * (rank + 1))
            read, total = sum(counts), total + half
    assert total <= read <= 1.05 * total, "at most a partial row more for each slice"


def test_operations_that_compute_are_refused():
    placed = PlacedTensor.from_stored("a", (4, 6))
    with pytest.raises(NotImplementedError, match="add computes new values"):
        placed + placed
