"""Source of parameters in the safetensors files of a Hugging Face directory. It reads only the requested slices."""

import hashlib
import itertools
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import parse_json
from odc_mpi.models.adapters.check import HashedWeights
from odc_mpi.models.quantization.linear import SCALES
from odc_mpi.models.quantization.stored import StoredScales, StoredTensors
from odc_mpi.models.quirks.composite import Composite
from odc_mpi.models.weights.conversion import PlacedTensor, loaded_tensors
from odc_mpi.shard.local_shards import WeightSource

#: File names that transformers uses.
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Supported dtypes of stored parameters, as named in safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: Sizes in bytes of a part, which has a digest, and of one read.
_BLOCK_BYTES, _READ_BYTES = 256 << 20, 4 << 20
_MAX_NAMES = 3


class SafetensorsWeights(HashedWeights):
    """Source of a module's parameters in safetensors files, which may have the module's names or the published names.

    `path` is the directory of the files. Raises `UserError` if a file or parameter is missing or damaged, if a
    parameter is quantized or its shape differs from that in the module, or if stored copies of tied parameters differ.

    Args:
        composite: Multimodal model in the directory if `module` is its text model, otherwise None.
        new: Source of the parameters of the module `new_head`, which may be missing from the files.
    """

    def __init__(
        self,
        path: Path,
        module: transformers.PreTrainedModel,
        composite: Composite | None = None,
        new: WeightSource | None = None,
        new_head: str | None = None,
    ) -> None:
        self._path = path
        self._new: dict[str, WeightSource] = {}
        self._copies: dict[str, list[PlacedTensor]] = {}  # of tied parameters, which some files store twice
        self.files = DirectoryTensors(path)
        scales = StoredScales(self.files, module)
        names = composite.names(module) if composite else {name: name for name in module.state_dict()}
        stored = {name: partial(self.files.placed, name) for name in self.files.file_of}
        loaded = loaded_tensors(composite.module if composite else module, stored, set(names.values()))
        self._placed = {name: loaded[other] for name, other in names.items() if other in loaded}
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        for name, parameter in module.named_parameters():
            placed_aliases = [self._placed[alias] for alias in aliases[parameter] if alias in self._placed]
            if placed_aliases:
                self._placed[name], *self._copies[name] = placed_aliases
                for placed in placed_aliases:
                    self._check(name, placed, parameter)
                if self._copies[name]:
                    self.read(name, 0, parameter.shape[-1])  # all ranks compare this row; later each only its slice
            elif name.endswith(f".{SCALES}"):
                self._new[name] = scales
            elif new is not None and new_head and name.startswith(f"{new_head}."):
                self._new[name] = new
            else:
                examples = ", ".join(itertools.islice(stored, _MAX_NAMES)) or "nothing"
                raise UserError(f"model.path: {path} stores no weights for {name}; it stores {examples}, ...")

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._new:
            return self._new[name].read(name, start, stop)
        values = self._placed[name].read_range(self.files, start, stop)
        for other in self._copies.get(name, ()):
            copy = other.read_range(self.files, start, stop).to(values.dtype)
            if not torch.allclose(values, copy, rtol=0, atol=0, equal_nan=True):
                raise UserError(
                    f"model.path: {self._path} stores different values for parameters that its configuration ties, "
                    f"{name} and another: set tie_word_embeddings to false in config.json there (for training, "
                    "model.config.tie_word_embeddings is enough)"
                )
        return values

    @override
    def parts(self) -> list[str]:
        files = {self.files.file_of[region.source] for placed in self._placed.values() for region in placed.regions}
        return [
            f"{file}:{block}"
            for file in sorted(files)
            for block in range(-(-(self._path / file).stat().st_size // _BLOCK_BYTES))
        ]

    @override
    def digest(self, part: str) -> str:
        file, _, block = part.rpartition(":")
        digest = hashlib.sha256()
        try:
            with (self._path / file).open("rb") as opened:
                opened.seek(int(block) * _BLOCK_BYTES)
                num_left = _BLOCK_BYTES
                while num_left and (content := opened.read(min(num_left, _READ_BYTES))):
                    digest.update(content)
                    num_left -= len(content)
        except OSError as error:
            raise UserError(f"model.path: cannot read {self._path / file}: {error.strerror}") from error
        return digest.hexdigest()

    def load_buffers(self, module: nn.Module) -> None:
        """Load the buffers of a module that are stored in the files. Other buffers keep their values."""
        for name, buffer in module.named_buffers():
            if name in self._placed:
                buffer.copy_(self.read(name, 0, buffer.numel()).reshape(buffer.shape))

    def _check(self, name: str, placed: PlacedTensor, parameter: nn.Parameter) -> None:
        shape, expected = parameter.shape, _FLOATS if parameter.is_floating_point() else ("U8",)
        for region in placed.regions:
            if (dtype := self.files.dtype(region.source)) not in expected:
                raise UserError(
                    f"model.path: {self._path} stores {name} as {dtype}, expected one of {', '.join(expected)}: "
                    "quantized weights cannot be trained"
                )
        if placed.shape != shape:
            raise UserError(
                f"model.path: expected {name} of shape {list(shape)}, as the configuration says, got "
                f"{list(placed.shape)} in {self._path}: change model.config, or config.json there"
            )


class DirectoryTensors(StoredTensors):
    """Source of the tensors in a directory, by their stored names. A file is opened when one of its tensors is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.file_of = self._index()

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored = self._slice(name)
        shape = stored.get_shape()
        row_numel = max(1, int(torch.Size(shape[1:]).numel()))
        first = start // row_numel
        rows = stored[first : -(-stop // row_numel)] if shape else stored[...]
        return rows.reshape(-1)[start - first * row_numel : stop - first * row_numel]

    @override
    def whole(self, name: str) -> torch.Tensor:
        return self.read(name, 0, self.placed(name).numel())

    def placed(self, name: str) -> PlacedTensor:
        """Return a placed tensor that is identical to a stored tensor."""
        return PlacedTensor.from_stored(name, self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the safetensors name of a stored tensor's dtype."""
        return str(self._slice(name).get_dtype())

    def _index(self) -> dict[str, str]:
        index = self._path / _INDEX
        if index.is_file():
            try:
                content = parse_json(index.read_bytes())
                files = content.get("weight_map") if isinstance(content, dict) else None
                if not isinstance(files, dict):
                    raise ValueError("expected a JSON object with an object 'weight_map'")
                if invalid := [file for file in files.values() if not isinstance(file, str) or "\0" in file]:
                    raise ValueError(f"expected file names in 'weight_map', got {invalid[0]!r}")
                return files
            except (ValueError, OSError) as error:
                raise UserError(
                    f"model.path: {index} is not an index of safetensors files: {one_line_message(error)}"
                ) from error
        if (self._path / _WEIGHTS).is_file():
            return dict.fromkeys(self._open(_WEIGHTS).keys(), _WEIGHTS)
        raise UserError(
            f"model.path: expected {_WEIGHTS} or {_INDEX} in {self._path}, found neither (pickled weights are not read)"
        )

    def _slice(self, stored: str) -> Any:
        try:
            return self._open(self.file_of[stored]).get_slice(stored)
        except SafetensorError as error:
            raise UserError(f"model.path: {self._path / self.file_of[stored]}: {one_line_message(error)}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self._path / file, framework="pt"))
            except OSError as error:
                raise UserError(f"model.path: cannot read {self._path / file}: {one_line_message(error)}") from error
            except SafetensorError as error:
                raise UserError(
                    f"model.path: {self._path / file} is not a complete safetensors file ({one_line_message(error)}): "
                    "download it again (in a clone, with git lfs pull)"
                ) from error
        return self._files[file]
