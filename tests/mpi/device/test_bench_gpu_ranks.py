"""`odc-mpi bench gpu` with host memory in a GPU's place: what is measured, that it was done, that it came out right."""

import json
import time
from dataclasses import replace

import pytest
import torch
from late_device import LateDevice
from small_training import configure
from test_device_training import keep_verdict, pose_as_device

from odc_mpi.bench import contenders
from odc_mpi.bench.gpu import benchmark as gpu
from odc_mpi.bench.gpu import kernels as gpu_kernels
from odc_mpi.bench.gpu import step as gpu_step
from odc_mpi.bench.gpu import windows as gpu_windows
from odc_mpi.comm.device import device_stores, staged
from odc_mpi.comm.kernels import native
from odc_mpi.comm.windows import device_window
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.stack.report import Operation
from odc_mpi.train.settings import dump

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

PROVED = Operation(one_sided=True, idle_s=1e-6, busy_s=1e-6, gb_per_s=100.0)
ON_HOSTS = {
    *("copy_device", "copy_to_device", "copy_to_host", "fetch_host", "fetch_host_in_place"),
    *("push_host_accumulate", "push_host_mailbox"),
}
ON_DEVICES = {"fetch_device", "push_device_accumulate", "push_device_mailbox"}


@pytest.fixture
def device(monkeypatch, tmp_path):
    made = pose_as_device(monkeypatch, tmp_path)
    for module in (gpu_windows, gpu_kernels):
        monkeypatch.setattr(module, "UNITS_BYTES", 3 * 4000)
        monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    return made


def test_all_ways_are_measured(world, device):
    result = gpu_windows.measure_size(world, device, 4000, 2, ["accumulate", "mailbox"])
    variants = result["variants"]
    assert set(variants) == ON_HOSTS | ON_DEVICES
    assert result["num_units"] == 3
    crossing = world.gather_objects(result["crossing_bytes"])
    assert sum(crossing) == 4000 * (world.size - 1)
    for name, entry in variants.items():
        assert list(entry) == ["seconds", "gb_per_s", "of_copy", "of_link"]
        assert 0 < entry["gb_per_s"]["low"] <= entry["gb_per_s"]["median"], name
        assert (entry["of_link"] is None) == (name in ON_DEVICES or name.startswith("copy")), name
    assert variants["copy_device"]["of_copy"] == 1


@pytest.mark.parametrize(
    ("reductions", "expected"), [([], set()), (["mailbox"], ON_DEVICES - {"push_device_accumulate"})]
)
def test_what_is_not_proved_is_not_tried(world, device, monkeypatch, reductions, expected):
    if not reductions:
        monkeypatch.delattr(device_window, "DeviceWindow")
    result = gpu_windows.measure_size(world, device, 4000, 1, reductions)
    assert set(result["variants"]) == ON_HOSTS | expected


def test_a_row_of_copies_ends_when_the_last_is_there(world, device):
    device.copy_s = 0.05
    units = gpu_windows.DeviceUnits(world, device, 400)
    for name in ("copy_device", "copy_to_device", "copy_to_host"):
        assert gpu_windows._sample(world, units.variants[name], 2) >= 0.05 / 2, name
    units.free()


@pytest.mark.parametrize(
    ("where", "what", "told"),
    [
        (staged.StagedParameters, "_bring", "fetch_host"),
        (staged.StagedGradients, "_send", "push_host_accumulate"),
        (device_stores.DeviceParameters, "_fetch", "fetch_device"),
        (device_stores.DeviceGradients, "_push", "push_device_accumulate"),
        (LateDevice, "add", "push_device_mailbox"),
    ],
)
def test_what_arrives_wrongly_is_found_out(world, device, monkeypatch, where, what, told):
    class Nothing:
        def wait(self):
            pass

        synchronize = wait

    monkeypatch.setattr(where, what, lambda *_: Nothing())
    if told == "push_device_mailbox" and world.size == 1:
        pytest.skip("the owner's own")
    with pytest.raises(RuntimeError, match=f"^{told} moved something wrongly"):
        gpu_windows.measure_size(world, device, 4000, 1, ["accumulate", "mailbox"])


def test_kernels_are_waited_for_and_checked(device, monkeypatch):
    add, flatten = native.add_slots, native.flatten
    results = []

    def later(kernel):
        results.append(kernel)
        device.later(kernel)

    def flatten_later(pieces, flat):
        largest = torch.zeros((), dtype=torch.float64)
        later(lambda: largest.copy_(flatten(pieces, flat)))
        return largest

    monkeypatch.setattr(native, "add_slots", lambda shard, slots: later(lambda: add(shard, slots)))
    monkeypatch.setattr(native, "flatten", flatten_later)
    result = gpu_kernels.measure_size(device, 4000, 2, True)
    assert results, "ours were called"
    names = [
        f"{task}_{dtype}{who}" for task in ("add", "flatten") for dtype in ("fp32", "bf16") for who in ("", "_torch")
    ]
    assert set(result["tasks"]) == {"copy", *names}
    for name, entry in result["tasks"].items():
        assert entry["gb_per_s"]["median"] > 0 and entry["of_copy"] > 0
        assert (entry["of_torch"] is None) == (name == "copy" or name.endswith("_torch"))
    assert result["tasks"]["copy"]["of_copy"] == 1


def test_without_kernels_torch_s_operators_are_measured(device):
    result = gpu_kernels.measure_size(device, 4000, 1, False)
    assert {"copy", "add_fp32_torch", "flatten_bf16_torch"} < set(result["tasks"])
    assert not {"add_fp32", "flatten_bf16"} & set(result["tasks"])


@pytest.mark.parametrize("name", ["add_slots", "flatten"])
def test_a_wrong_kernel_is_found_out(device, monkeypatch, name):
    real = getattr(native, name)
    monkeypatch.setattr(
        native,
        name,
        lambda target, pieces: real(target, pieces[:-1]) if name == "add_slots" else real(target[:-1], pieces),
    )
    with pytest.raises(RuntimeError, match=f"{name.split('_')[0]}_fp32 came out wrong"):
        gpu_kernels.measure_size(device, 4000, 1, True)


@pytest.fixture
def config(dataset_path):
    """Steps that show a wrong factor at once: no optimizer that does not care for it."""
    config = configure(dataset_path, **{"model.param_dtype": "bfloat16", "comm.mailbox_bytes": 1 << 20})
    optim = replace(config.optim, optimizer="sgd", learning_rate=0.1, momentum=0.9, max_grad_norm=1.0)
    data = replace(config.data, minibatch_sequences=5)
    return gpu_step.comparable(replace(config, optim=optim, data=data))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_torch_and_ours_train_the_same(world, device, config, dtype):
    config = replace(config, model=replace(config.model, param_dtype=dtype))
    names = [gpu_step.HOST, gpu_step.DEVICE]
    with world.alone() as alone:
        result = gpu_step.measure(alone, config, device, names, steps=2, repeats=2)
    assert set(result["seconds"]) == set(result["tokens_per_s"]) == {"plain", *names}
    assert set(result["overhead"]) == set(result["loss_deviation"]) == set(names)
    # Rounding included: sums in fp32 of what bf16 gave, and masters in fp32.
    assert max(result["loss_deviation"].values()) < 1e-5
    assert len(result["losses"]) == 6 and result["losses"][-1] != result["losses"][0]
    assert result["param_dtype"] == dtype
    assert device.copies > 0


def test_a_plain_loop_that_trains_something_else_is_found_out(world, device, config, monkeypatch):
    monkeypatch.setattr("odc_mpi.bench.baselines.plain.Masters.write", lambda self: None)
    with world.alone() as alone, pytest.raises(UserError, match=r"losses of host_windows and plain differ by 0\.\d"):
        gpu_step.measure(alone, config, device, [gpu_step.HOST], steps=3, repeats=2)


def test_a_round_ends_when_the_device_is_done(world, device):
    class Quick:
        def step(self):
            device.later(lambda: time.sleep(0.05))
            return 1.0, 10

    device.later(lambda: time.sleep(1.0))  # whatever was before
    with world.alone() as alone:
        done = contenders._round(alone, Quick(), "quick", 2, lambda: device.mark().synchronize())
    assert 0.1 <= done.seconds < 1.0
    assert (done.num_tokens, done.losses) == (20, [1.0, 1.0])


@pytest.fixture
def options(world, shared_dir, config):
    path = shared_dir / "gpu.yaml"
    if world.rank == 0:
        path.write_text(dump(config))
    world.gather_objects(None)
    return gpu.Options([4000, 400], repeats=1, steps=1, config=str(path))


def run(world, device, options):
    heard = []
    result = gpu.measure(
        world,
        device,
        options,
        lambda known, doing, may_end: heard.append((doing, may_end, json.loads(json.dumps(known)))),
    )
    json.dumps(result, allow_nan=False)
    assert world.gather_objects(result["left_out"])[0] == result["left_out"]
    return result, heard


@pytest.mark.slow
def test_without_a_verdict_nothing_is_risked(world, device, options, monkeypatch):
    monkeypatch.delattr(device_window, "DeviceWindow")
    result, heard = run(world, device, options)
    assert [size["size_bytes"] for size in result["sizes"]] == [4000, 400]
    assert all(set(size["variants"]) == ON_HOSTS for size in result["sizes"])
    assert [size["size_bytes"] for size in result["kernels"]] == [4000, 400]
    assert set(result["step"]["overhead"]) == {"host_windows"}
    left = result["left_out"]
    assert set(left) == {*ON_DEVICES, "kernels", "step_device_windows"}
    assert "odc-mpi doctor" in left["fetch_device"] and left["step_device_windows"].startswith("on one rank: ")
    assert "NVIDIA" in left["kernels"]
    assert [doing for doing, may_end, _ in heard if may_end] in ([], ["steps with windows on GPUs"])


@pytest.mark.slow
def test_what_may_end_it_comes_last_and_is_measured_beside_the_rest(world, device, options):
    result, heard = run(world, device, replace(options, window_device="cuda"))
    assert all(set(size["variants"]) == ON_HOSTS | ON_DEVICES for size in result["sizes"])
    assert set(result["step"]["overhead"]) == {"host_windows", "device_windows"}
    assert set(result["left_out"]) == {"kernels"}
    risky = [may_end for _, may_end, _ in heard]
    assert risky == sorted(risky), "the safe parts come first"
    doing, _, known = next(news for news in heard if news[1])
    assert doing == "units of 4000 with windows on GPUs"
    assert len(known["sizes"]) == 2 and known["kernels"] and known["step"], "all of them were told by then"


@pytest.mark.slow
def test_a_doctor_s_verdict_is_followed(world, device, options):
    keep_verdict(world, device, get=PROVED, put=PROVED)
    result, _ = run(world, device, options)
    left = result["left_out"]
    assert "Accumulate" in left["push_device_accumulate"] and "push_device_mailbox" not in left
    for size in result["sizes"]:
        assert set(size["variants"]) - ON_HOSTS == {"fetch_device", "push_device_mailbox"}
    # A job of one rank is another layout.
    assert ("step_device_windows" in left) == (world.size > 1)


@pytest.mark.slow
def test_nobody_s_windows_on_gpus(world, device, options):
    result, _ = run(world, device, replace(options, window_device="cpu"))
    assert {result["left_out"][name] for name in (*ON_DEVICES, "step_device_windows")} == {gpu.SET}


@pytest.mark.slow
def test_without_memory_for_windows_the_rest_is_measured(world, device, options, monkeypatch):
    def no_cupy(num_bytes):
        raise UserError("no CuPy")

    if world.rank == world.size - 1:
        monkeypatch.setattr(device, "window_memory", no_cupy)
    result, _ = run(world, device, replace(options, window_device="cuda"))
    assert result["left_out"]["fetch_device"] == "no CuPy"
    assert result["step"] is not None


def test_a_mistake_on_rank_0_ends_all(world, device, options, monkeypatch):
    monkeypatch.setattr(
        contenders.Ours, "step", lambda self: (lambda loss, tokens: (1.01 * loss, tokens))(*_step(self))
    )
    with pytest.raises(AgreedError, match=r"losses of host_windows and plain differ by 0\.01"):
        run(world, device, options)
    with pytest.raises(AgreedError, match="nowhere"):
        run(world, device, replace(options, config="nowhere.yaml"))


def test_what_only_we_can_do_is_not_compared(dataset_path):
    with pytest.raises(UserError, match=r"model.gradient_checkpointing: false only"):
        gpu_step.comparable(configure(dataset_path, **{"model.gradient_checkpointing": "true"}))
    with pytest.raises(UserError, match=r"model.reduce_dtype: float32 only"):
        gpu_step.comparable(configure(dataset_path, **{"model.reduce_dtype": "float64"}))


def test_the_benchmark_s_own_data_and_model(world, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_step, "SEQUENCES", 3)
    monkeypatch.setattr(gpu_step, "LENGTH", 50)
    config = gpu_step.configuration(None, tmp_path / "own.h5", 7.0)
    assert (config.model.param_dtype, config.run.device, config.optim.device) == ("bfloat16", "cuda", "cuda")
    inputs = gpu_step.open_inputs(config, 0, 1)
    numel = sum(parameter.numel() for parameter in inputs.model.module.parameters())
    assert 1.0e9 < numel < 1.1e9
    assert inputs.dataset.lengths.tolist() == [50, 50, 50]
    inputs.dataset.close()


_step = contenders.Ours.step
