"""Content of the directories that `odc-mpi export` writes: a full model, adapters, or a merged model.

Tensors of the checkpoint and the base model are read only when the output file that contains them is written. All
tensors of one output file are in memory at the same time.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from typing_extensions import override

from odc_mpi.checkpoint.export import Exporter, model_config, read_full_tensor
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.errors import UserError
from odc_mpi.hub import cached_model_path, parse_name
from odc_mpi.models.adapters import ADAPTER, adapted_layers, add_adapters, add_product, base_name, is_adapter, peft_name
from odc_mpi.models.build import is_model_directory
from odc_mpi.models.heads import REWARD
from odc_mpi.models.load import load_base, load_checkpoint, saved_task
from odc_mpi.models.weights.conversion import published_tensors
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.partition import replicated_persistent_tensors


class AdapterExporter(Exporter):
    """Exporter of adapters to a directory that `PeftModel.from_pretrained` can load.

    The exported adapter_config.json names the directory `base` of the base model. By default, that is the directory
    recorded in the checkpoint, which then need not exist. Raises `UserError` if `base` contains no model or the wrong
    one, or the base model is multimodal.
    """

    stem, config_name, dtype = "adapter_model", "adapter_config.json", "float32"

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        if base is not None:
            load_base(checkpoint, base=base)
        self._checkpoint = checkpoint
        self._base = str(base or "") or checkpoint.manifest.metadata["base"]["path"]
        path = Path(cached_model_path(self._base or ""))
        if self._base and is_model_directory(path) and _is_multimodal(path):
            raise UserError(
                f"{checkpoint.directory} has adapters of the text model of {path}, which is multimodal: peft would not "
                "find their layers, so export the merged text model with --merge"
            )
        self._names = {peft_name(name): name for name in _trained(checkpoint)}

    @override
    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        records = {exported: self._checkpoint.record(f"{MODEL}/{name}") for exported, name in self._names.items()}
        return {exported: record.numel * dtype.itemsize for exported, record in records.items()}

    @override
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return read_full_tensor(self._checkpoint, self._names[name]).to(dtype)

    @override
    def config(self, dtype: str) -> dict[str, Any]:
        base, revision = parse_name(self._base or "") or (self._base, None)  # as peft names a base from the Hub
        adapter = self._checkpoint.manifest.metadata["adapter"]
        return {**adapter, "base_model_name_or_path": base, "revision": revision}


class PublishedExporter(Exporter, WeightSource):
    """Exporter of a full model as published tensors, which have the names and shapes that `save_pretrained` writes.

    A published tensor may be part of a tensor in `module`, such as one of several fused experts. Subclasses therefore
    implement `read` for ranges of the module's tensors. Buffers keep their dtype.
    """

    def __init__(self, checkpoint: Checkpoint, module: transformers.PreTrainedModel) -> None:
        self._checkpoint = checkpoint
        self.dtype = checkpoint.manifest.metadata["config"]["model"]["param_dtype"]
        self.generates = saved_task(checkpoint) is not REWARD
        self._buffers = dict(replicated_persistent_tensors(module))
        self._shapes = {name: t.shape for name, t in (*module.named_parameters(), *self._buffers.items())}
        self._published = published_tensors(module, self._shapes)

    @override
    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        return {name: placed.numel() * self._type(name, dtype).itemsize for name, placed in self._published.items()}

    @override
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        placed = self._published[name]
        return placed.read_range(self, 0, placed.numel()).reshape(placed.shape).to(self._type(name, dtype))

    @override
    def config(self, dtype: str) -> dict[str, Any]:
        return model_config(self._checkpoint, dtype)

    def _type(self, name: str, dtype: torch.dtype) -> torch.dtype:
        buffer = self._buffers.get(self._published[name].regions[0].source)
        return dtype if buffer is None else buffer.dtype


class FullModelExporter(PublishedExporter):
    """Exporter of a checkpoint that contains a full transformers model.

    Raises `UserError` if the checkpoint contains only adapters, or if its model is not a transformers model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if "base" in checkpoint.manifest.metadata:
            raise UserError(f"{checkpoint.directory} contains only adapters: export them, or the model with --merge")
        super().__init__(checkpoint, load_checkpoint(checkpoint).module)

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return read_tensor(self._checkpoint, f"{MODEL}/{name}", start, stop)


class MergedExporter(PublishedExporter):
    """Exporter of a base model (or its text model, if it is multimodal) with the adapters merged into the weights.

    An adapted weight is `W + alpha / r * B @ A`, computed in float32. Modules trained in full replace the originals.
    `base` is the directory of the base model, by default the one recorded in the checkpoint. Raises `UserError` if the
    base model is missing or is not the base of the adapters.
    """

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        meta_model = load_base(checkpoint, base=base)
        super().__init__(checkpoint, meta_model.module)
        self._base = meta_model.weights
        self._replaced = {base_name(name): name for name in _trained(checkpoint) if not is_adapter(name)}
        adapter = checkpoint.manifest.metadata["adapter"]
        self._module = add_adapters(meta_model, adapter, 0, torch.float32).module
        self._layers = adapted_layers(self._module)
        self._merged: tuple[str, torch.Tensor] | None = None

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        if name in self._replaced:
            return read_tensor(self._checkpoint, f"{MODEL}/{self._replaced[name]}", start, stop)
        if name not in self._layers:
            return self._base.read(name, start, stop)
        if self._merged is None or self._merged[0] != name:
            self._merged = name, self._merge(name).reshape(-1)
        return self._merged[1][start:stop].clone()  # tensors of a safetensors file cannot share memory

    def _merge(self, name: str) -> torch.Tensor:
        layer, shape = self._layers[name], self._shapes[name]
        weight = self._base.read(name, 0, shape.numel()).reshape(shape)
        a, b = (read_full_tensor(self._checkpoint, f"{layer}.lora_{side}.{ADAPTER}.weight") for side in "AB")
        return add_product(self._module.get_submodule(layer), weight.float(), a, b)


def _is_multimodal(path: Path) -> bool:
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return config.get_text_config() is not config


def _trained(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.manifest.tensors.items()
    return [path.removeprefix(f"{MODEL}/") for path, record in tensors if record.kind == "trainable"]
