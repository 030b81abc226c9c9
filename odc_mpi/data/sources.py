"""Sources of text: files, folders, data sets of the library `datasets` and the standard library, optionally weighted.

Without weights, each example (line or row) of each source is used once. With weights, the number of examples from each
source is proportional to its weight, and the examples are selected at random (see `mix`). Sources are read one after
the other, because training shuffles sequences.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from odc_mpi.data.readers import arrow, stdlib, text_files
from odc_mpi.data.records.block import Block
from odc_mpi.data.records.schema import Columns
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

STDLIB = "stdlib"
_BLOCK_SAMPLES = 256
_MAX_NAMES = 6  # files of a folder that the report lists
_MAX_PASSES = 1000  # over one source
_EXPANSION = 4  # approximate ratio of text to compressed file


@dataclass(frozen=True)
class DataSource:
    """A source of examples.

    Attributes:
        name: Path, "stdlib" or name on the Hugging Face Hub.
        weight: Weight of the source, relative to those of the other sources; None if the user specified no weight.
        files: Files of the source, in the order in which they are read; empty for the standard library.
        dataset: Loaded `datasets.Dataset`, which is stored in `files`; None for other sources.
    """

    name: str
    weight: float | None
    files: tuple[Path, ...]
    dataset: Any = None

    @property
    def origin(self) -> str:
        """Absolute path of the source, or its name if no file or folder has this name."""
        return str(Path(self.name).resolve()) if Path(self.name).exists() else self.name

    @property
    def is_folder(self) -> bool:
        """True if the user specified a folder of data files."""
        return self.dataset is None and bool(self.files) and self.files[0] != Path(self.name)

    def describe_folder(self) -> str:
        """Return a line of text with the number and the names of the files in the folder."""
        names = [file.name for file in self.files]
        if len(names) > _MAX_NAMES:
            names = [*names[: _MAX_NAMES - 1], "...", names[-1]]
        return f"{self.name}: {len(self.files)} {'files' if len(self.files) > 1 else 'file'}, {', '.join(names)}"

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return the path, the size in bytes and the modification time in ns of each file."""
        return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]

    @property
    def num_bytes(self) -> int:
        """Total size of the files, in bytes."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def num_text_bytes(self) -> int:
        """Approximate size of the text in all files after decompression, in bytes."""
        packed = (*text_files.COMPRESSED_SUFFIXES, arrow.PARQUET_SUFFIX)
        return sum(file.stat().st_size * (_EXPANSION if file.suffix in packed else 1) for file in self.files)

    @cached_property
    def _samples(self) -> list[stdlib.StdlibFunction]:
        return list(stdlib.functions())

    def columns(self, columns: Columns) -> Columns:
        """Return `columns`, or an empty mapping for the standard library, whose fields are never renamed."""
        return {} if self.name == STDLIB else columns

    def count(self) -> int:
        """Return the number of examples, including invalid ones. Reads text files completely."""
        if self.dataset is not None:
            return len(self.dataset)
        if not self.files:
            return len(self._samples)
        count_file = {True: arrow.count_rows, False: text_files.count_records}
        return sum(count_file[_is_parquet(file)](file) for file in self.files)

    def read(self, on_bytes_read: Callable[[int], None]) -> Iterator[Block]:
        """Yield the examples in blocks, and call `on_bytes_read` with the number of bytes read since its last call."""
        if self.dataset is not None:
            yield from arrow.read_rows(self.name, self.dataset, on_bytes_read, self.num_bytes)
        elif not self.files:
            for begin in range(0, len(self._samples), _BLOCK_SAMPLES):
                records = [each._asdict() for each in self._samples[begin : begin + _BLOCK_SAMPLES]]
                yield Block(STDLIB, "function", list(enumerate(records, begin + 1)))
        else:
            for file in self.files:
                yield from (arrow.read_parquet if _is_parquet(file) else text_files.read_records)(file, on_bytes_read)


def find_sources(specs: Sequence[str], split: str | None = None) -> list[DataSource]:
    """Return the sources that the user specified. Data sets on the Hugging Face Hub are downloaded if necessary.

    Each of `specs` is a path, "stdlib" or a name on the Hugging Face Hub, optionally followed by a colon and a weight.
    For `split`, see `arrow.load`. Raises a `UserError` if a source cannot be found or loaded, a folder has no data
    files, a weight is not finite and positive, only some sources have one, or `split` is set but no source has splits.
    """
    sources = [_find(os.path.expanduser(spec), split) for spec in specs]  # noqa: PTH111 - with its weight
    if split is not None and all(source.dataset is None for source in sources):
        raise UserError(
            "--split: expected a directory of save_to_disk or a name on the Hugging Face Hub as a SOURCE, got neither"
        )
    without = [source.name for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise UserError(
            f"expected a weight for each SOURCE or for none, got none for {without[0]!r}: write {without[0]}:WEIGHT"
        )
    return sources


def _find(spec: str, split: str | None) -> DataSource:
    name, weight = _split_weight(spec)
    if name == STDLIB:
        return DataSource(name, weight, ())
    path = Path(name)
    if path.is_file():
        return DataSource(name, weight, (path,))
    if path.is_dir() and not arrow.is_saved_dataset(path):
        return DataSource(name, weight, _data_files(path))
    is_file_name = text_files.bare_suffix(path) in (*text_files.SUFFIXES, arrow.PARQUET_SUFFIX, ".txt", ".h5")
    is_hub_name = arrow.is_hub_name(name) and not is_file_name and not Path(path.parts[0]).is_dir()
    if not (path.is_dir() or is_hub_name):
        raise UserError(
            f"SOURCE {spec!r}: no such file or folder{suggest_name(path)}: give a JSONL, JSON, CSV or Parquet file, a "
            f"folder of such files, a data set of the Hugging Face Hub (OWNER/NAME), or {STDLIB}"
        )
    dataset = arrow.load(name, split)
    return DataSource(name, weight, tuple(Path(file["filename"]) for file in dataset.cache_files), dataset)


def suggest_name(path: Path) -> str:
    """Return " (did you mean NAME?)" with the name most similar to that of a missing file, or "" if none is similar."""
    return did_you_mean(path.name, (each.name for each in path.parent.glob("*")))


def _split_weight(spec: str) -> tuple[str, float | None]:
    """Return the name of a source and its weight. A specification that names an existing file has no weight."""
    name, colon, number = spec.rpartition(":")
    if not colon or Path(spec).exists():
        return spec, None
    try:
        weight = float(number)
    except ValueError:
        return spec, None
    if not 0 < weight < float("inf"):
        raise UserError(f"expected a weight above 0, got {number!r} in {spec!r}: change SOURCE")
    return name, weight


def _data_files(folder: Path) -> tuple[Path, ...]:
    """Return the files in a folder with supported suffixes, sorted by path. Omits .json files that are not arrays."""
    files = sorted(path for path in folder.iterdir() if is_supported(path) and path.is_file())
    data = tuple(
        file for file in files if text_files.bare_suffix(file) != text_files.ARRAY_SUFFIX or text_files.is_array(file)
    )
    if not data:
        raise UserError(
            f"no file in the folder {str(folder)!r} ends in {', '.join(text_files.SUFFIXES)} (these also with .gz or "
            f".zst; {text_files.ARRAY_SUFFIX} if it is an array) or {arrow.PARQUET_SUFFIX}: change SOURCE"
        )
    return data


def is_supported(path: Path) -> bool:
    """Return True if `path` has the suffix of a readable format and its name does not begin with a dot."""
    if path.name.startswith("."):
        return False
    return text_files.bare_suffix(path) in text_files.SUFFIXES or _is_parquet(path)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == arrow.PARQUET_SUFFIX


@dataclass(frozen=True)
class Mixture:
    """Sources, and the number of examples to use from each.

    `counts` contains, for each source, the number of examples it has and the number to use; None to use each example
    once. `seed` is the seed for the random selection of examples.
    """

    sources: Sequence[DataSource]
    counts: Sequence[tuple[int, int]] | None
    seed: int

    @property
    def num_bytes(self) -> int:
        """Total number of bytes to read in all passes over the sources."""
        return sum(source.num_bytes * len(self._passes(index)) for index, source in enumerate(self.sources))

    def read(self, on_bytes_read: Callable[[int], None]) -> Iterator[tuple[int, Block]]:
        """Yield blocks of the examples to use, each with the index of its source. See also `DataSource.read`."""
        for index, source in enumerate(self.sources):
            for selection in self._passes(index):
                for block in source.read(on_bytes_read):
                    yield index, block.select(selection)

    def _passes(self, index: int) -> list[Iterator[bool]]:
        """Return, for each pass over a source, an iterator that yields True for each example to use."""
        if self.counts is None:
            return [itertools.repeat(True)]
        count, num_taken = self.counts[index]
        complete, rest = divmod(num_taken, count)
        sample = [_sample_without_replacement(count, rest, f"{self.seed} {index}")] if rest else []
        return [itertools.repeat(True)] * complete + sample


def mix(sources: Sequence[DataSource], seed: int, strategy: str) -> Mixture:
    """Determine the number of examples to use from each source. If the sources have weights, the examples are counted.

    `strategy` is "first_exhausted" or "all_exhausted", as in `datasets.interleave_datasets`. "first_exhausted" uses no
    example twice: the source with the fewest examples relative to its weight is used completely, and the others in
    part. "all_exhausted" uses every example: the source with the most examples relative to its weight is used once, and
    the others repeatedly. Raises a `UserError` if a weighted source is empty or would be read more than 1,000 times.
    """
    if any(source.weight is None for source in sources):
        return Mixture(sources, None, seed)
    counts = [source.count() for source in sources]
    for source, count in zip(sources, counts, strict=True):
        if not count:
            raise UserError(f"{source.name!r} contains no examples but has a weight: change SOURCE")
    weights = [source.weight or 0.0 for source in sources]
    choose = min if strategy == "first_exhausted" else max
    ratios = [count / weight for count, weight in zip(counts, weights, strict=True)]
    decisive = ratios.index(choose(ratios))
    passes = [ratios[decisive] * weight / count for count, weight in zip(counts, weights, strict=True)]
    if max(passes) > _MAX_PASSES:
        often = weights.index(max(weights))
        raise UserError(
            f"expected weights for which no source is read more than {_MAX_PASSES:,} times, got "
            f"{weights[decisive]:g} for {sources[decisive].name!r} and {weights[often]:g} for {sources[often].name!r}: "
            "change SOURCE"
        )
    counts_taken = [max(1, round(ratios[decisive] * weight)) for weight in weights]
    counts_taken[decisive] = counts[decisive]
    if strategy == "first_exhausted":
        counts_taken = [min(pair) for pair in zip(counts_taken, counts, strict=True)]
    return Mixture(sources, list(zip(counts, counts_taken, strict=True)), seed)


def _sample_without_replacement(count: int, num_samples: int, seed: str) -> Iterator[bool]:
    """Yield True for `num_samples` of `count` examples at random (Knuth, TAOCP 2, algorithm S)."""
    uniform = random.Random(seed).random  # the same in every version of Python
    for num_left in range(count, 0, -1):
        is_used = uniform() * num_left < num_samples
        num_samples -= is_used
        yield is_used
