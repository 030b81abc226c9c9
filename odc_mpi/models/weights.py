"""Sources of the initial weights of transformers models: random initialization, and safetensors files.

Both sources return slices of parameters and never hold the full model. Both can also be verified as the base model of
adapters, because an adapter checkpoint does not contain the base model. It contains the origin of the base (a
directory, or a configuration and a seed), and a SHA-256 digest of each part. A part is a block of 256 MiB of a
safetensors file, or a randomly initialized parameter. The parts are distributed over the ranks. Each rank reads its
share to compute the digests, and reads it again to verify them.
"""

import copy
import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import parse_json
from odc_mpi.shard.local_shards import WeightSource

#: File names that transformers uses.
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Supported types of stored parameters, by their names in safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: Bytes of a file per digest, and bytes per read.
_BLOCK_BYTES, _READ_BYTES = 256 << 20, 4 << 20


class HashedWeights(WeightSource, Protocol):
    """Source of weights that consist of named parts, each with a digest."""

    def parts(self) -> list[str]:
        """Return the names of the parts."""

    def digest(self, part: str) -> str:
        """Read a part, and return the SHA-256 of its content in hexadecimal."""


class RandomInitWeights(HashedWeights):
    """Source of randomly initialized parameters. It calls `_init_weights` of the model for each module separately.

    So changes that `_init_weights` makes to submodules of its argument are lost, such as the scaling of residual
    projections by depth in GPT-2.

    `seed` and the name of a module determine its values, so they depend neither on the number of ranks nor on the order
    of reading. The module that was initialized last is cached, since its parameters are read consecutively. The model
    must be on the meta device.
    """

    def __init__(self, module: transformers.PreTrainedModel, seed: int) -> None:
        self._model = module
        # A copy, as sharding replaces the parameters of the module by placeholders. Meta tensors cost no memory.
        self._modules = dict(copy.deepcopy(module).named_modules())
        self._seed = seed
        self._initialized: tuple[str, nn.Module] | None = None

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        if self._initialized is None or self._initialized[0] != owner:
            self._initialized = owner, self._init_module(owner)
        parameter = self._initialized[1]._parameters[key]
        assert parameter is not None
        part = parameter.detach().view(-1)[start:stop]
        if part.isnan().any():
            raise UserError(f"model.config: {type(self._model).__name__} does not initialize {name}: use model.path")
        return part

    @override
    def parts(self) -> list[str]:
        return [name for name, _ in self._modules[""].named_parameters()]

    @override
    def digest(self, part: str) -> str:
        parameter = self.read(part, 0, self._modules[""].get_parameter(part).numel())
        return hashlib.sha256(parameter.contiguous().numpy().tobytes()).hexdigest()

    def init_buffers(self) -> None:
        """Allocate and initialize the buffers of the model in host memory, for example rotary frequencies."""
        for name, submodule in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in submodule._buffers.values()):
                initialized = self._init_module(name)
                submodule._buffers.update(initialized._buffers)
                # Some modules keep a second reference to a buffer in an attribute of another name.
                submodule.__dict__.update(
                    {k: v for k, v in initialized.__dict__.items() if isinstance(v, torch.Tensor)}
                )

    @torch.no_grad()
    def _init_module(self, name: str) -> nn.Module:
        module = copy.copy(self._modules[name])
        module._parameters = {k: _nan_like(p) for k, p in module._parameters.items()}
        module._buffers = {k: _real(b) for k, b in module._buffers.items()}
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            # Weights are initialized on the CPU. `torch.manual_seed` would record a traceback for each device type.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            self._model._init_weights(module)
        return module


class SafetensorsWeights(HashedWeights):
    """Source of parameters in the safetensors files of a Hugging Face directory. Reads only the requested slices.

    Raises:
        UserError: A file or parameter is missing or damaged, or the shape of a parameter differs from the module.
    """

    def __init__(self, path: Path, module: transformers.PreTrainedModel) -> None:
        self._path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._index()
        self._stored: dict[str, str] = {}
        for name, parameter in module.named_parameters():
            self._stored[name] = self._find(name, module.base_model_prefix)
            stored = self._slice(self._stored[name])
            if stored.get_dtype() not in _FLOATS:
                raise UserError(
                    f"model.path: {self._path} stores {name} as {stored.get_dtype()}, expected one of "
                    f"{', '.join(_FLOATS)}: quantized weights cannot be trained"
                )
            shape = list(stored.get_shape())
            if shape != list(parameter.shape):
                raise UserError(
                    f"model.path: {name} has the shape {list(parameter.shape)} in the configuration, but {self._path} "
                    f"stores {shape}"
                )

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored = self._slice(self._stored[name])
        shape = stored.get_shape()
        if start >= stop:
            return torch.empty(0)
        row_numel = max(1, int(torch.Size(shape[1:]).numel()))
        first = start // row_numel
        rows = stored[first : -(-stop // row_numel)] if shape else stored[...]
        return rows.reshape(-1)[start - first * row_numel : stop - first * row_numel]

    @override
    def parts(self) -> list[str]:
        return [
            f"{file}:{block}"
            for file in sorted({self._file_of[stored] for stored in self._stored.values()})
            for block in range(-(-(self._path / file).stat().st_size // _BLOCK_BYTES))
        ]

    @override
    def digest(self, part: str) -> str:
        file, _, block = part.rpartition(":")
        digest = hashlib.sha256()
        try:
            with (self._path / file).open("rb") as opened:
                opened.seek(int(block) * _BLOCK_BYTES)
                left = _BLOCK_BYTES
                while left and (content := opened.read(min(left, _READ_BYTES))):
                    digest.update(content)
                    left -= len(content)
        except OSError as error:
            raise UserError(f"model.path: cannot read {self._path / file}: {error.strerror}") from error
        return digest.hexdigest()

    def load_buffers(self, module: nn.Module) -> None:
        """Load the buffers of a module that are stored in the files."""
        for name, buffer in module.named_buffers():
            if name in self._file_of:
                buffer.copy_(self._slice(name)[...])

    def _index(self) -> dict[str, str]:
        index = self._path / _INDEX
        if index.is_file():
            try:
                return dict(parse_json(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"model.path: {index} is not an index of safetensors files: {one_line_message(error)}"
                ) from error
        if (self._path / _WEIGHTS).is_file():
            return dict.fromkeys(self._open(_WEIGHTS).keys(), _WEIGHTS)
        raise UserError(
            f"model.path: expected {_WEIGHTS} or {_INDEX} in {self._path}, found neither (pickled weights are not read)"
        )

    def _find(self, name: str, prefix: str) -> str:
        # Files that were saved from the model without its head lack the prefix.
        for candidate in (name, name.removeprefix(f"{prefix}.")):
            if candidate in self._file_of:
                return candidate
        raise UserError(f"model.path: {self._path} stores no weights for {name}")

    def _slice(self, stored: str) -> Any:
        try:
            return self._open(self._file_of[stored]).get_slice(stored)
        except SafetensorError as error:
            raise UserError(f"model.path: {self._path / self._file_of[stored]}: {one_line_message(error)}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self._path / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"model.path: cannot read {self._path / file}: {one_line_message(error)}") from error
        return self._files[file]


def _nan_like(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(torch.full(parameter.shape, float("nan")), requires_grad=parameter.requires_grad)


def _real(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return torch.empty_like(buffer, device="cpu") if buffer is not None and buffer.is_meta else buffer


def part_digests(weights: HashedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Read this rank's share of the parts, and return their SHA-256 digests by name. Does not communicate."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: HashedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Verify one of `size` shares of the base model of adapters. Does not communicate.

    `record` describes the base model in the checkpoint: `path`, or `config` and `seed`, and `sha256` by part. Raises a
    `UserError` if the share of this rank differs from it.
    """
    expected: Mapping[str, str] = record["sha256"]
    differing = sorted(expected.keys() ^ weights.parts()) or [
        part for part, digest in part_digests(weights, rank, size).items() if digest != expected[part]
    ]
    if differing:
        raise UserError(
            f"model: expected the base model of the adapters, {describe_base(record)}, got a different one: "
            f"{differing[0].rpartition(':')[0] or differing[0]} differs: set model.path or --base to the right base"
        )


def describe_base(record: Mapping[str, Any]) -> str:
    """Return a text for error messages about the origin of a base model. For `record`, see `check_base`."""
    if record["path"] is not None:
        return f"from {Path(record['path'])}"
    return f"a {record['config'].get('model_type')} randomly initialized with seed {record['seed']}"
