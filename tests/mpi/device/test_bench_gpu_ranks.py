"""`benchmarks/gpu.py` with host memory in a GPU's place: every part is measured and checked."""

import json
import sys

import gpu
import gpu_kernels
import gpu_step
import gpu_windows
import pytest
from small_training import QWEN2, configure
from test_device_training import pose_as_device

from odc_mpi.training.settings import dump

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.slow]


@pytest.fixture
def device(monkeypatch, tmp_path):
    for module in (gpu_windows, gpu_kernels):
        monkeypatch.setattr(module, "UNITS_BYTES", 3 * 4000)
        monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    return pose_as_device(monkeypatch, tmp_path)


@pytest.fixture
def options(world, dataset_path, shared_dir):
    path = shared_dir / "gpu.yaml"
    if world.rank == 0:
        path.write_text(dump(configure(dataset_path, **{"model.param_dtype": "bfloat16"})))
    world.gather_objects(None)
    return gpu.Options([4000, 400], repeats=1, steps=1, config=str(path), window_device="cuda")


def test_every_part_is_measured(world, device, options):
    result = gpu.measure(world, device, options)
    json.dumps(result, allow_nan=False)
    assert [len(size["variants"]) for size in result["sizes"]] == [10, 10]
    assert len(result["kernels"]) == 2 and list(result["left_out"]) == ["kernels"], "torch's operators alone"
    assert set(result["step"]["overhead"]) == {"host_windows", "device_windows", "device_copies"}
    assert set(result["ranks"]["overhead"]) == {"host_windows", "device_windows", "independent"}
    for part in (result["step"], result["ranks"]):
        assert max(part["loss_deviation"].values()) < 1e-3 and not part["left_out"]
        assert part["mfu"]["plain"] is None
    # Parameters and gradients are in windows.
    for part, name in [("step", "device_copies"), ("ranks", "device_windows")]:
        assert result[part]["peak_bytes"][name] > result[part]["model_numel"] * (2 + 4)


def test_the_default_model_on_the_command_line(world, device, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_find", lambda host_rank: device)
    monkeypatch.setattr(gpu, "World", lambda **_: world)
    monkeypatch.setattr(gpu, "run_on_all_ranks", lambda world, work: work() or 0)
    monkeypatch.setattr(gpu_step, "MODEL", QWEN2)
    monkeypatch.setattr(gpu_step, "peak_flops", lambda name: 1e9)
    for name, value in {"LENGTH": 32, "VOCAB_SIZE": 64, "SEQUENCES": 8}.items():
        monkeypatch.setattr(gpu_step, name, value)
    words = "--parts step ranks --contenders plain host_windows device_copies --steps 1 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words.split()])
    code = gpu.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (code, len(lines) > 1) == (0, world.rank == 0)
    if lines:
        assert set(lines[-1]["step"]["overhead"]) == {"host_windows", "device_copies"}
        assert set(lines[-1]["ranks"]["overhead"]) == {"host_windows", "independent"}
        step, layers, hidden, vocab = (
            lines[-1]["step"],
            *(QWEN2[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")),
        )
        flops = 6 * (step["model_numel"] - vocab * hidden) + 6 * layers * hidden * 32
        assert step["mfu"]["plain"] == pytest.approx(step["tokens_per_s"]["plain"] * flops / 1e9, rel=0.02)
        assert "ranks_device_windows" in lines[-1]["left_out"], "the doctor has proved nothing"
