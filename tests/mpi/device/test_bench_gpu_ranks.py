"""`benchmarks/gpu.py` with host memory in a GPU's place: every part is measured and checked."""

import json

import gpu
import gpu_kernels
import gpu_windows
import pytest
from small_training import configure
from test_device_training import pose_as_device

from odc_mpi.training.settings import dump

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.slow]


def test_every_part_is_measured(world, dataset_path, shared_dir, tmp_path, monkeypatch):
    device = pose_as_device(monkeypatch, tmp_path)
    for module in (gpu_windows, gpu_kernels):
        monkeypatch.setattr(module, "UNITS_BYTES", 3 * 4000)
        monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    path = shared_dir / "gpu.yaml"
    if world.rank == 0:
        path.write_text(dump(configure(dataset_path, **{"model.param_dtype": "bfloat16"})))
    world.gather_objects(None)
    options = gpu.Options([4000, 400], repeats=1, steps=1, config=str(path), window_device="cuda")
    result = gpu.measure(world, device, options)
    json.dumps(result, allow_nan=False)
    assert [len(size["variants"]) for size in result["sizes"]] == [10, 10]
    assert len(result["kernels"]) == 2 and list(result["left_out"]) == ["kernels"], "torch's operators alone"
    assert set(result["step"]["overhead"]) == {"host_windows", "device_windows"}
    assert max(result["step"]["loss_deviation"].values()) < 1e-3
