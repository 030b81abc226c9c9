"""A result of `odc-mpi bench gpu` made up for tests, and the times that it is made of."""

from odc_mpi.bench.gpu import kernels as gpu_kernels
from odc_mpi.bench.measure import entries

LINKS = {"fetch_host": "copy_to_device", "push_host_mailbox": "copy_to_host"}
TIMES = {
    "copy_device": [1e-3, 2e-3],
    "copy_to_device": [10e-3, 20e-3],
    "copy_to_host": [20e-3, 20e-3],
    "fetch_host": [20e-3, 40e-3],
    "push_host_mailbox": [100e-3, 100e-3],
    "fetch_device": [4e-3, 8e-3],
}


def result(on_device=True, with_kernels=True):
    times = dict(TIMES, fetch_host_in_place=[30e-3, 60e-3], push_host_accumulate=[80e-3, 80e-3])
    if on_device:
        times |= {"push_device_accumulate": [8e-3, 8e-3], "push_device_mailbox": [8e-3, 8e-3]}
    else:
        del times["fetch_device"]
    names = [f"{task}_{kind}" for task in ("add", "flatten") for kind in ("fp32", "bf16")]
    tasks = {"copy": [1e-3], **{f"{name}_torch": [9e-3] for name in names}}
    tasks |= {name: [3e-3] for name in names} if with_kernels else {}
    contenders = ["host_windows", *(["device_windows"] if on_device else [])]
    step = {
        "model_numel": 1_030_000_000,
        "param_dtype": "bfloat16",
        "seconds": {name: {"low": 1.2, "median": 1.25, "high": 1.3} for name in ("plain", *contenders)},
        "tokens_per_s": dict.fromkeys(("plain", *contenders), 13107.2),
        "overhead": {
            name: {"low": 0.03, "median": 0.041 - 0.01 * i, "high": 0.06} for i, name in enumerate(contenders)
        },
        "loss_deviation": dict.fromkeys(contenders, 0.0004),
    }
    return {
        "benchmark": "gpu",
        "library": "Open MPI 5.0.11",
        "ranks": 2,
        "nodes": 1,
        "repeats": 7,
        "devices": ["NVIDIA H200 (1 visible), CUDA 12.9"],
        "torch": "2.13.0",
        "load_average": [0.5, 2.04],
        "left_out": {} if on_device else {"fetch_device": "windows on GPUs were not tried"},
        "sizes": [
            {"size_bytes": size, "num_units": 1, "crossing_bytes": size // 2}
            | {"variants": entries(times, size, of_copy=lambda _: "copy_device", of_link=LINKS.get)}
            for size in (4 << 20, 256 << 20)
        ],
        "kernels": [
            {"size_bytes": 4 << 20, "tasks": gpu_kernels.task_entries(dict.fromkeys(tasks, 8 << 20), tasks)},
        ],
        "step": step,
    }
