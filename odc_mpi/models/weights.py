"""Where a transformers model's initial weights come from: a seeded draw, or safetensors files.

Both are a `shard.local_shards.WeightSource`: they give slices of parameters, and never hold the whole model. As the base of
adapters they also tell whether they are that base: a checkpoint of adapters does not hold their base. It holds where
the base comes from (a directory; or a configuration and a seed) and a SHA-256 of each part of it: of each 256 MiB of
the safetensors files, or of each drawn parameter. The ranks share the parts out: each reads its share of the base to
make the digests, and again to check them.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from odc_mpi.errors import UserError, one_line_message

#: transformers' own file names.
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Stored types that are read as they are, in the names of safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: Bytes of a file that one digest covers, and that are read at a time.
_BLOCK_BYTES, _READ_BYTES = 256 << 20, 4 << 20


class RandomInitWeights:
    """Parameters as the model's own initialisation draws them, module by module.

    Changes that a family's initialisation makes afterwards from a parent module (GPT-2 scales its residual projections
    by depth) are left out.

    Every module is seeded by its name, so a value depends neither on the number of ranks nor on the order of reading.
    The last module is kept, since its parameters are read in turn.

    Args:
        module: On the meta device.
        seed: Seed of the run.
    """

    def __init__(self, module: transformers.PreTrainedModel, seed: int) -> None:
        self._model = module
        # A copy of the tree: the module's own parameters are about to be replaced by placeholders. It is on the meta
        # device and costs no memory.
        self._modules = dict(copy.deepcopy(module).named_modules())
        self._seed = seed
        self._initialized: tuple[str, nn.Module] | None = None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        owner, _, key = name.rpartition(".")
        if self._initialized is None or self._initialized[0] != owner:
            self._initialized = owner, self._init_module(owner)
        parameter = self._initialized[1]._parameters[key]
        assert parameter is not None
        part = parameter.detach().view(-1)[start:stop]
        if part.isnan().any():
            raise UserError(
                f"model.config: {type(self._model).__name__} gives {name} no initial values; use model.path"
            )
        return part

    def parts(self) -> list[str]:
        """Return the names of what `digest` takes."""
        return [name for name, _ in self._names()]

    def digest(self, part: str) -> str:
        """Return the SHA-256 of a parameter's values, in hexadecimal. Local; draws the parameter."""
        numel = dict(self._names())[part]
        return hashlib.sha256(self.read(part, 0, numel).contiguous().numpy().tobytes()).hexdigest()

    def _names(self) -> list[tuple[str, int]]:
        seen: dict[int, tuple[str, int]] = {}
        for owner, module in self._modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    seen.setdefault(id(parameter), (f"{owner}.{key}", parameter.numel()))
        return list(seen.values())

    def init_buffers(self) -> None:
        """Give the model's buffers, such as rotary frequencies, real memory and their initial values."""
        for name, submodule in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in submodule._buffers.values()):
                initialized = self._init_module(name)
                submodule._buffers.update(initialized._buffers)
                # Some modules keep a buffer a second time under another attribute's name.
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
            # Of the CPU only, where all is drawn. `torch.manual_seed` would note a traceback for each kind of device.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            self._model._init_weights(module)
        return module


class SafetensorsWeights:
    """Parameters in safetensors files; only the requested slices are read.

    Args:
        path: A Hugging Face model directory.
        module: The model of the parameters.

    Raises:
        UserError: Files are missing or damaged; a parameter is missing or has another shape.
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
                    f"{', '.join(_FLOATS)}: quantised weights cannot be trained"
                )
            shape = list(stored.get_shape())
            if shape != list(parameter.shape):
                raise UserError(
                    f"model.path: the configuration gives {name} the shape {list(parameter.shape)}, "
                    f"{self._path} stores {shape}"
                )

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`. Local; reads the rows that the slice touches."""
        stored = self._slice(self._stored[name])
        shape = stored.get_shape()
        if start >= stop:
            return torch.empty(0)
        row_numel = max(1, int(torch.Size(shape[1:]).numel()))
        first = start // row_numel
        rows = stored[first : -(-stop // row_numel)] if shape else stored[...]
        return rows.reshape(-1)[start - first * row_numel : stop - first * row_numel]

    def parts(self) -> list[str]:
        """Return the names of what `digest` takes: blocks of the files, each its file and its number."""
        return [
            f"{file}:{block}"
            for file in sorted({self._file_of[stored] for stored in self._stored.values()})
            for block in range(-(-(self._path / file).stat().st_size // _BLOCK_BYTES))
        ]

    def digest(self, part: str) -> str:
        """Return the SHA-256 of a block of a file, in hexadecimal. Local; reads the block."""
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
        """Fill the persistent buffers that are in the files."""
        for name, buffer in module.named_buffers():
            if name in self._file_of:
                buffer.copy_(self._slice(name)[...])

    def _index(self) -> dict[str, str]:
        """Return the file of every stored tensor."""
        try:
            if (self._path / _INDEX).is_file():
                return dict(json.loads((self._path / _INDEX).read_text())["weight_map"])
            if (self._path / _WEIGHTS).is_file():
                return dict.fromkeys(self._open(_WEIGHTS).keys(), _WEIGHTS)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"model.path: {self._path / _INDEX} is not an index of weights: {one_line_message(error)}"
            ) from error
        raise UserError(
            f"model.path: expected {_WEIGHTS} or {_INDEX} in {self._path}, found neither (pickled weights are not read)"
        )

    def _find(self, name: str, prefix: str) -> str:
        # A file saved from the bare base model leaves its prefix out.
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


class HashedWeights(Protocol):
    """Weights of a base, a `shard.local_shards.WeightSource` of which parts have digests."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor: ...
    def parts(self) -> list[str]: ...
    def digest(self, part: str) -> str: ...


def part_digests(weights: HashedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Return the SHA-256 of this rank's share of the parts, by part. Local; reads them."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: HashedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Check that a base is the one of a checkpoint of adapters, this rank's share of its parts.

    Args:
        weights: Of the base that is there.
        record: The reference in the checkpoint: `path`, or `config` and `seed`; `sha256` by part.
        rank: This rank.
        size: Number of ranks that share the parts out.

    Raises:
        UserError: It is another base.
    """
    expected: Mapping[str, str] = record["sha256"]
    differing = sorted(expected.keys() ^ weights.parts()) or [
        part for part, digest in part_digests(weights, rank, size).items() if digest != expected[part]
    ]
    if differing:
        raise UserError(
            f"model: expected the base that the adapters were trained over, {describe_base(record)}, got another: "
            f"{differing[0].rpartition(':')[0] or differing[0]} differs: name that base with model.path, or --base"
        )


def describe_base(record: Mapping[str, Any]) -> str:
    """Say in words where a base comes from."""
    if record["path"] is not None:
        return f"of {Path(record['path'])}"
    return f"a {record['config'].get('model_type')} drawn with seed {record['seed']}"
