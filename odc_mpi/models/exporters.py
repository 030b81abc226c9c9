"""What `odc-mpi checkpoint export` writes of a checkpoint of adapters: the adapters for peft, or the merged model.

One tensor of the base is read at a time, and a file's tensors are in memory until the file is written.
"""

import math
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.export import Exporter, model_config, read_whole
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL
from odc_mpi.models.adapters import ADAPTER, base_name, is_adapter, peft_name
from odc_mpi.models.load import load_base
from odc_mpi.shard.partition import replicated_persistent_tensors


class AdapterExporter(Exporter):
    """Adapters, as `PeftModel.from_pretrained(base, out)` loads them.

    Args:
        checkpoint: Of adapters.
        base: Where their base is now, to be named in the configuration; None: it is named as the run had it.

    Raises:
        UserError: There is no base in that place, or another.
    """

    stem, config_name, dtype = "adapter_model", "adapter_config.json", "float32"

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        if base is not None:
            load_base(checkpoint, base=base)
        self._checkpoint = checkpoint
        self._base = str(base or "") or checkpoint.manifest.metadata["base"]["path"]
        self._names = {peft_name(name): name for name in _trained(checkpoint)}

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """See `Exporter`. All in one file, as peft reads no others."""
        return {
            exported_name: math.prod(self._checkpoint.record(f"{MODEL}/{name}").shape) * dtype.itemsize
            for exported_name, name in self._names.items()
        }

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Exporter`."""
        return read_whole(self._checkpoint, self._names[name]).to(dtype)

    def config(self, dtype: str) -> dict[str, Any]:
        """See `Exporter`."""
        return {**self._checkpoint.manifest.metadata["adapter"], "base_model_name_or_path": self._base}


class MergedExporter(Exporter):
    """The base with its adapters added: W + B A alpha / r, computed in float32.

    Args:
        checkpoint: Of adapters.
        base: Where their base is; None: where it was when the checkpoint was saved.

    Raises:
        UserError: The base is not there, or another.
    """

    def __init__(self, checkpoint: Checkpoint, base: Path | None = None) -> None:
        metadata = checkpoint.manifest.metadata
        self._checkpoint = checkpoint
        self.dtype = metadata["config"]["model"]["param_dtype"]
        meta_model = load_base(checkpoint, base=base)
        self._base = meta_model.weights
        self._shapes = {name: p.shape for name, p in meta_model.module.named_parameters()}
        self._buffers = dict(replicated_persistent_tensors(meta_model.module))
        self._scale = metadata["adapter"]["lora_alpha"] / metadata["adapter"]["r"]
        trained = _trained(checkpoint)
        self._replaced = {base_name(name): name for name in trained if not is_adapter(name)}
        # The two matrices of an adapter belong to the weight of their layer.
        self._added: dict[str, str] = {}
        for name in trained:
            if is_adapter(name):
                layer = name.rpartition(".lora_")[0]
                self._added[f"{base_name(layer)}.weight"] = layer

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """See `Exporter`."""
        sizes = {name: shape.numel() * dtype.itemsize for name, shape in self._shapes.items()}
        return sizes | {name: buffer.nbytes for name, buffer in self._buffers.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Exporter`."""
        if name in self._buffers:
            return self._buffers[name]
        if name in self._replaced:
            return read_whole(self._checkpoint, self._replaced[name]).to(dtype)
        shape = self._shapes[name]
        weight = self._base.read(name, 0, shape.numel()).reshape(shape)
        if name not in self._added:
            return weight.to(dtype)
        a, b = (
            read_whole(self._checkpoint, f"{self._added[name]}.lora_{side}.{ADAPTER}.weight").float() for side in "AB"
        )
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(dtype)

    def config(self, dtype: str) -> dict[str, Any]:
        """See `Exporter`."""
        return model_config(self._checkpoint, dtype)


def _trained(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.manifest.tensors.items()
    return [path.removeprefix(f"{MODEL}/") for path, record in tensors if record.kind == "trainable"]
