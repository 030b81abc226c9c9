"""Export of an adapter checkpoint by `odc-mpi checkpoint export`, as adapters for peft or as a merged model.

Tensors of the base model are read one at a time. All tensors of an output file are in memory until it is written.
"""

from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from odc_mpi.checkpoint.export import Exporter, model_config, read_full_tensor
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL
from odc_mpi.models.adapters import ADAPTER, adapted_parameters, add_adapters, base_name, is_adapter, peft_name
from odc_mpi.models.load import load_base
from odc_mpi.shard.partition import replicated_persistent_tensors


class AdapterExporter(Exporter):
    """Exports adapters to a directory that `PeftModel.from_pretrained(base, out)` can load.

    Args:
        checkpoint: Adapter checkpoint.
        base: Directory of the base model, which the exported configuration names. None: as in the checkpoint.

    Raises:
        UserError: `base` has no model, or its model is not the base of the adapters.
    """

    stem, config_name, dtype = "adapter_model", "adapter_config.json", "float32"

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        if base is not None:
            load_base(checkpoint, base=base)
        self._checkpoint = checkpoint
        self._base = str(base or "") or checkpoint.manifest.metadata["base"]["path"]
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
        return {**self._checkpoint.manifest.metadata["adapter"], "base_model_name_or_path": self._base}


class MergedExporter(Exporter):
    """Exports a model whose adapters are merged into the base weights: W + B A alpha / r, computed in float32.

    For arguments and errors, see `AdapterExporter`. The base model is read even if `base` is None.
    """

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        metadata = checkpoint.manifest.metadata
        self._checkpoint = checkpoint
        self.dtype = metadata["config"]["model"]["param_dtype"]
        meta_model = load_base(checkpoint, base=base)
        self._base = meta_model.weights
        self._shapes = {name: p.shape for name, p in meta_model.module.named_parameters()}
        self._buffers = dict(replicated_persistent_tensors(meta_model.module))
        trained = _trained(checkpoint)
        self._replaced = {base_name(name): name for name in trained if not is_adapter(name)}
        self._adapted = adapted_parameters(add_adapters(meta_model, metadata["adapter"], 0, torch.float32).module)

    @override
    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        sizes = {name: shape.numel() * dtype.itemsize for name, shape in self._shapes.items()}
        return sizes | {name: buffer.nbytes for name, buffer in self._buffers.items()}

    @override
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        if name in self._replaced:
            return read_full_tensor(self._checkpoint, self._replaced[name]).to(dtype)
        shape = self._shapes[name]
        weight = self._base.read(name, 0, shape.numel()).reshape(shape)
        if (adapted := self._adapted.get(name)) is None:
            return weight.to(dtype)
        a, b = (read_full_tensor(self._checkpoint, f"{adapted.layer}.lora_{side}.{ADAPTER}.weight") for side in "AB")
        return adapted.add_to(weight.float(), a, b).to(dtype)

    @override
    def config(self, dtype: str) -> dict[str, Any]:
        return model_config(self._checkpoint, dtype)


def _trained(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.manifest.tensors.items()
    return [path.removeprefix(f"{MODEL}/") for path, record in tensors if record.kind == "trainable"]
