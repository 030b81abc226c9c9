"""Each configuration in jobs/models is valid, and its comments give the command and the memory."""

import json
import re
import sys
from dataclasses import replace

import pytest
from mpi_launch import ROOT

from odc_mpi.models.build import from_config
from odc_mpi.training import settings as configuration
from odc_mpi.training.inputs import _with_adapters
from odc_mpi.training.start.memory_estimate import estimate_memory

CONFIGURATIONS = sorted((ROOT / "jobs" / "models").glob("*.yaml"))
QWEN = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "intermediate_size": 6144, "hidden_size": 2048}
#: Sizes of the published models, and numbers of ranks and of ranks per node.
JOBS = {
    "gsm8k": ({**QWEN, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
               "tie_word_embeddings": True}, 8, 8),
    "llama3_8b_lora": ({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}, 2, 2),
    "qwen3_30b_a3b": ({**QWEN, "model_type": "qwen3_moe", "num_attention_heads": 32, "num_hidden_layers": 48,
                       "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
                       "num_experts_per_tok": 8}, 32, 8),
    "qwen3_8b": ({**QWEN, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                  "num_hidden_layers": 36, "num_key_value_heads": 8}, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_is_valid_and_says_what_it_needs(path):
    config = configuration.load(path)
    assert config.model.path and config.model.param_dtype == "bfloat16" and config.run.device == "cuda"
    text = path.read_text()
    assert "Not run here" in text and f"odc-mpi job {path.relative_to(ROOT)} " in text
    said = re.search(r"Memory per rank, by --dry-run with (\d+) ranks(?:.|\n)*? (\d+) GiB\n?[# ]*of the GPU.*(?:.|\n)*?"
                     r"\b(\d+) GiB of host memory", text)  # fmt: skip
    sizes, ranks, per_node = JOBS[path.stem]
    assert config.data.max_tokens_per_microbatch == 8192
    if config.model.gradient_checkpointing == "auto":
        config = replace(config, model=replace(config.model, gradient_checkpointing=config.lora.r is None))
    parts = estimate_memory(config, _with_adapters(from_config(sizes, 0), config), ranks, per_node, [8192])
    totals = (sum(part.num_bytes for part in parts if part.on_gpu is on_gpu) for on_gpu in (True, False))
    assert [int(number) for number in said.groups()] == [ranks, *(round(total / 2**30) for total in totals)]


def test_the_reward_of_gsm8k(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "jobs" / "models")
    gsm8k = pytest.importorskip("gsm8k")
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "1 + 1,233?", "answer": "It is.\n#### 1,234"}) + "\n")
    gsm8k.main(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["answer"] == "1234" and record["messages"][0]["content"].startswith("1 + 1,233?")
    chat = [{"role": "assistant", "content": "So #### 1,234."}]
    assert gsm8k.correct_number(["#### 1234", "#### 7", "1234", chat], ["1234"] * 4) == [1.0, 0.1, 0.0, 1.0]
    del sys.modules["gsm8k"]
