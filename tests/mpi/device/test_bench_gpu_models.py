"""`benchmarks/gpu_models.py` with a tiny model, and host memory in a GPU's place: parts agree with transformers."""

import json

import gpu_models
import gpu_setup
import pytest
from gpu_setup import prepare
from gpu_step import failed
from test_device_training import pose_as_device

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(1),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft's get_peft_model reads it
]


@pytest.fixture
def setup(world, monkeypatch, tmp_path):
    device = pose_as_device(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_setup, "find_device", lambda kind, host_rank: device)
    with prepare(world, None, "cuda", 4, 2, lambda line: None, tiny=True) as made:
        yield made


def test_every_part_agrees_with_transformers(setup, capsys):
    gpu_models.measure(setup, list(gpu_models.PARTS), result := {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and json.loads(lines[-1]) == result
    assert not failed(result), [each["left_out"] for each in (result, result.get("lora", result))]
    assert result["generation"]["equal_tokens"]["odc_mpi"] > 0.9
    assert set(result["full"]["overhead"]) == {"plain", "odc_mpi"}
    for part in ("full", "lora"):
        assert result[part]["loss_deviation"]["odc_mpi"] < 6e-4
        assert result[part]["losses"][0] > result[part]["losses"][-1], "it trains"
    step, phases = (result["rewards"][key]["odc_mpi"] for key in ("seconds", "phases"))
    assert 0 < phases["generate_s"] + phases["reward_s"] + phases["train_s"] < step["high"]


def test_parts_survive_a_part_that_fails(setup, monkeypatch):
    monkeypatch.setitem(gpu_models.PARTS, "generation", lambda setup: 1 / 0)
    gpu_models.measure(setup, ["generation", "lora"], result := {})
    assert result["left_out"] == {"generation": "failed: ZeroDivisionError: division by zero"} and result["lora"]
    assert failed(result)
