"""Load a mixture of experts with published names on all ranks: bytes that each rank reads, time, peak memory.

    mpiexec -n 2 python benchmarks/load_speed.py [--gigabytes 5] [--dir FOLDER]

Rank 0 writes bfloat16 safetensors files, one for each layer and expert tensors one by one, and drops them from the page
cache. Keys: `file_bytes`; for each rank `requested_bytes` of stored tensors, `storage_bytes` read from the disk by the
process, `seconds`, and `anonymous_bytes`: the increase of the largest memory that is neither file nor window.
"""

import argparse
import json
import os
import re
import tempfile
import threading
from math import prod
from pathlib import Path
from time import perf_counter, sleep

import torch
import transformers
from safetensors.torch import save_file

from odc_mpi.api import shard_model
from odc_mpi.models.build import from_directory
from odc_mpi.models.weights.conversion import published_tensors
from odc_mpi.runtime.world import World

#: Settings of Qwen3 30B A3B with a fourth of the experts; a layer has 0.33 GB, embedding and head have 1.2 GB.
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 32,
}


def write_model(folder: Path, num_bytes: float) -> int:
    """Write a model of about this size, or a tiny one for less than 1 GB. Return the bytes of its tensors."""
    settings = dict(SIZES)
    if num_bytes < 1e9:
        settings |= {"vocab_size": 1024, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    settings["num_hidden_layers"] = max(2, round((num_bytes - 1.25e9) / 0.33e9))
    config = transformers.AutoConfig.for_model("qwen3_moe", **settings)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(placed.shape) for name, placed in _published(module).items()}
    block = torch.randn(max(map(prod, shapes.values()))).bfloat16()
    weight_map = {}
    for name in shapes:
        layer = re.search(r"layers\.(\d+)\.", name)
        weight_map[name] = f"model-{layer[1] if layer else 'rest'}.safetensors"
    for file in set(weight_map.values()):
        names = [name for name in shapes if weight_map[name] == file]
        tensors = {name: block[: prod(shapes[name])].clone().view(shapes[name]) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)
    return 2 * sum(map(prod, shapes.values()))


def _published(module: transformers.PreTrainedModel) -> dict:
    return published_tensors(module, {name: p.shape for name, p in module.named_parameters()})


class PeakMemory:
    """The largest anonymous memory of this process during a `with` block, sampled 100 times per second."""

    def __enter__(self) -> "PeakMemory":
        self._first = self.num_bytes = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.num_bytes -= self._first

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.num_bytes = max(self.num_bytes, self._now())
            sleep(0.01)

    def _now(self) -> int:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def storage_bytes() -> int:
    """Return the bytes that this process has caused to be read from the disk."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def load(folder: Path, world: World) -> dict[str, float]:
    """Load the frozen model in bfloat16, and measure it on this rank."""
    requested, storage, began = 0, storage_bytes(), perf_counter()
    with PeakMemory() as memory:
        meta_model = from_directory(folder)
        plain = meta_model.weights.files.read

        def read(name: str, start: int, stop: int) -> torch.Tensor:
            nonlocal requested
            values = plain(name, start, stop)
            requested += values.numel() * values.itemsize
            return values

        meta_model.weights.files.read = read
        meta_model.module.requires_grad_(False)
        for parameter in meta_model.module.parameters():
            parameter.data = parameter.data.bfloat16()
        model = shard_model(meta_model.module, world, weights=meta_model.weights)
    seconds = perf_counter() - began
    model.close()
    return {
        "requested_bytes": requested,
        "storage_bytes": storage_bytes() - storage,
        "seconds": round(seconds, 2),
        "anonymous_bytes": memory.num_bytes,
    }


def main() -> None:
    """Write, load, and print the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with World(timeout_s=600) as world, tempfile.TemporaryDirectory(dir=options.dir) as temporary:
        folder = Path(world.gather_objects(temporary)[0])
        written = write_model(folder, options.gigabytes * 1e9) if world.rank == 0 else 0
        [file_bytes, *_] = world.gather_objects(written)
        ranks = world.gather_objects(load(folder, world))
        if world.rank == 0:
            print(json.dumps({"file_bytes": file_bytes, "ranks": ranks}))


if __name__ == "__main__":
    main()
