"""Sources of text: files, folders of files and the standard library, optionally mixed by weights.

Without weights, each example of each source is used once. With weights, the numbers of examples (lines or rows) used
from the sources are proportional to the weights. The examples are selected at random. None is used twice, unless the
strategy allows it (see `mix`). Sources are read in the order of the command line, since training shuffles sequences. A
source that cannot be read raises a UserError.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from odc_mpi.data import jsonl, parquet, stdlib
from odc_mpi.data.examples import FieldNames
from odc_mpi.data.jsonl import RepeatFn
from odc_mpi.errors import UserError

STDLIB = "stdlib"
_BLOCK_SAMPLES = 256
_MAX_NAMES = 6  # files of a folder that the report lists
_MAX_PASSES = 1000  # over one source
_EXPANSION = 4  # approximate ratio of text to compressed file


class Block(Protocol):
    """Some examples of a source, in the order of the file. Blocks are pickled and sent to worker processes."""

    def records(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield, for each example, its location for error messages and a function that returns the record.

        The function raises an InvalidRecordError if the example cannot be parsed.
        """
        ...


@dataclass(frozen=True)
class StdlibBlock:
    """`Block` whose examples are functions of the Python standard library."""

    samples: Sequence[stdlib.StdlibFunction]

    def records(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield, for each function, "stdlib" as its location and a function that returns the record."""
        for sample in self.samples:
            record = {"prompt": sample.prompt, "completion": sample.completion}
            yield STDLIB, lambda record=record: record  # type: ignore[misc]


@dataclass(frozen=True)
class DataSource:
    """A source of examples.

    Attributes:
        name: Path or "stdlib", as specified by the user, without the weight.
        weight: Weight of the source, relative to those of the other sources; None if the user specified no weight.
        files: Files, in the order in which they are read. There are none for the standard library.
    """

    name: str
    weight: float | None
    files: tuple[Path, ...]

    @property
    def is_folder(self) -> bool:
        """True if the user specified a folder."""
        return bool(self.files) and self.files[0] != Path(self.name)

    def describe_folder(self) -> str:
        """Return a line with the number and the names of the folder's files, for display."""
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
        """Approximate total size of the text in the files after decompression, in bytes."""
        packed = (*jsonl.COMPRESSED, parquet.SUFFIX)
        return sum(file.stat().st_size * (_EXPANSION if file.suffix in packed else 1) for file in self.files)

    @cached_property
    def _samples(self) -> list[stdlib.StdlibFunction]:
        return list(stdlib.functions())

    def fields(self, fields: FieldNames) -> FieldNames:
        """Return the field names of the records: the defaults for the standard library, otherwise `fields`."""
        return fields if self.files else FieldNames()

    def count(self) -> int:
        """Return the number of examples, including invalid ones. Reads JSON lines completely to count them."""
        if not self.files:
            return len(self._samples)
        return sum(parquet.count_rows(file) if _is_parquet(file) else jsonl.count_lines(file) for file in self.files)

    def read(self, num_repeats: RepeatFn, on_bytes_read: Callable[[int], None]) -> Iterator[Block]:
        """Yield the examples in blocks.

        Args:
            num_repeats: Function that returns how often to use an example. It is called for each example, in order.
            on_bytes_read: Function that is called now and then with the number of bytes read since its last call.
        """
        if not self.files:
            samples = [sample for sample in self._samples for _ in range(num_repeats())]
            for begin in range(0, len(samples), _BLOCK_SAMPLES):
                yield StdlibBlock(samples[begin : begin + _BLOCK_SAMPLES])
        for file in self.files:
            yield from (parquet.read_rows if _is_parquet(file) else jsonl.read_lines)(file, num_repeats, on_bytes_read)


def find_sources(specs: Sequence[str]) -> list[DataSource]:
    """Return the sources that the user specified.

    Args:
        specs: Specification of each source: a path or "stdlib", optionally followed by a colon and a weight. If the
            complete specification is the path of a file or folder, it has no weight.

    Raises:
        UserError: A source does not exist, a folder has no data files, or only some of the sources have a weight.
    """
    sources = [_find(spec) for spec in specs]
    without = [source.name for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise UserError(
            f"expected a weight for each SOURCE or for none, got none for {without[0]!r}: write {without[0]}:WEIGHT"
        )
    return sources


def _find(spec: str) -> DataSource:
    name, weight = _split_weight(spec)
    if name == STDLIB:
        return DataSource(name, weight, ())
    path = Path(name)
    if path.is_dir():
        return DataSource(name, weight, _data_files(path))
    if not path.is_file():
        raise UserError(
            f"SOURCE {spec!r} is not a file or folder: give a JSONL or Parquet file, a folder of such files, or "
            f"{STDLIB}"
        )
    return DataSource(name, weight, (path,))


def _split_weight(spec: str) -> tuple[str, float | None]:
    """Return the name of a source and its weight, which is None if the specification does not end in a weight."""
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
    """Return the files in a folder whose suffix is supported, sorted by path."""
    files = tuple(sorted(path for path in folder.iterdir() if is_supported(path) and path.is_file()))
    if not files:
        suffixes = ", ".join((*jsonl.SUFFIXES, parquet.SUFFIX))
        raise UserError(
            f"no file in the folder {str(folder)!r} ends in {suffixes} (the first two also with .gz or .zst): "
            "change SOURCE"
        )
    return files


def is_supported(path: Path) -> bool:
    """Return True if the name of a file in a folder is that of JSON lines or Parquet."""
    if path.name.startswith("."):
        return False
    bare = path.with_suffix("") if path.suffix in jsonl.COMPRESSED else path
    return bare.suffix in jsonl.SUFFIXES or _is_parquet(path)


def _is_parquet(path: Path) -> bool:
    return path.suffix == parquet.SUFFIX


@dataclass(frozen=True)
class Mixture:
    """Sources, and the number of examples to use from each.

    Attributes:
        sources: Sources, in the order in which they are read.
        counts: Number of examples in each source and number of examples to use from it; None to use each example once.
        seed: Seed for the random selection of examples.
    """

    sources: Sequence[DataSource]
    counts: Sequence[tuple[int, int]] | None
    seed: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes to read. A file that is read several times is counted as often."""
        return sum(source.num_bytes * len(self._passes(index)) for index, source in enumerate(self.sources))

    def read(self, on_bytes_read: Callable[[int], None]) -> Iterator[tuple[int, Block]]:
        """Yield the index of a source and a block of its examples, until all examples to use were yielded.

        Args:
            on_bytes_read: See `DataSource.read`.
        """
        for index, source in enumerate(self.sources):
            for num_repeats in self._passes(index):
                for block in source.read(num_repeats, on_bytes_read):
                    yield index, block

    def _passes(self, index: int) -> list[RepeatFn]:
        """Return the function that selects the examples, for each pass over a source."""
        if self.counts is None:
            return [_once]
        count, num_taken = self.counts[index]
        complete, rest = divmod(num_taken, count)
        sample = [_sample_without_replacement(count, rest, f"{self.seed} {index}")] if rest else []
        return [_once] * complete + sample


def mix(sources: Sequence[DataSource], seed: int, strategy: str) -> Mixture:
    """Compute the number of examples to use from each source. With weights, this counts the examples of all sources.

    Args:
        sources: Sources, all with a weight or all without a weight.
        seed: Seed for the random selection of examples.
        strategy: "first_exhausted" or "all_exhausted", as in `datasets.interleave_datasets`. "first_exhausted" uses
            no example twice. The source with the fewest examples relative to its weight is used completely, the others
            in part. "all_exhausted" uses every example. The source with the most examples relative to its weight is
            used once, the others repeatedly.

    Raises:
        UserError: A source with a weight is empty, or the weights require more than 1000 passes over a source.
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


def _once() -> int:
    return 1


def _sample_without_replacement(count: int, num_samples: int, seed: str) -> RepeatFn:
    """Return a function that selects `num_samples` of `count` examples at random (Knuth, TAOCP 2, algorithm S)."""
    uniform = random.Random(seed).random  # the same on every version of Python
    left = [count, num_samples]

    def num_repeats() -> int:
        is_taken = uniform() * left[0] < left[1]
        left[0] -= 1
        left[1] -= is_taken
        return int(is_taken)

    return num_repeats
