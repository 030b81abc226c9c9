"""Reading data sets of the library `datasets`: directories written by `save_to_disk`, and data sets on the Hub.

The extra `datasets` installs the library, which is imported only if the user specifies such a source. Code in data sets
is never run, because the library has not supported it since version 4.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from odc_mpi.data.readers.records import Block, without_nulls
from odc_mpi.errors import UserError, one_line_message

_BATCH_ROWS = 256
#: Owner and name on the Hub, optionally with a configuration, such as "openai/gsm8k/main".
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(/[\w.-]+)?")
_DEFAULT_SPLIT = "train"


def is_saved_dataset(path: Path) -> bool:
    """Return True if `path` is a directory written by `save_to_disk`."""
    names = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
    return any(all((path / name).is_file() for name in each) for each in names)


def is_hub_name(name: str) -> bool:
    """Return True if `name` has the form of a data set name on the Hub: owner/name or owner/name/configuration."""
    return _HUB_NAME.fullmatch(name) is not None


def load(name: str, split: str | None) -> Any:
    """Load a `datasets.Dataset`, whose rows are read on demand. A data set on the Hub is downloaded if necessary.

    `name` is a directory written by `save_to_disk`, or the name of a data set on the Hub. There, `split` may include a
    slice, as in "train[:1%]". None selects the only split of a directory that has just one, and otherwise "train".
    Raises `UserError` if the library is missing, or the data set or its split cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name!r} is not a file or folder of files; reading it as a data set of Hugging Face requires the package "
            "datasets: pip install 'odc_mpi[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    try:
        if not Path(name).is_dir():
            owner, title, *configuration = name.split("/")
            return datasets.load_dataset(f"{owner}/{title}", *configuration, split=split or _DEFAULT_SPLIT)
        found = datasets.load_from_disk(name)
    except Exception as error:  # of many kinds: no network, no permission, damaged files
        raise UserError(
            f"the data set {name!r} cannot be loaded ({one_line_message(error)}): change SOURCE or --split"
        ) from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or _DEFAULT_SPLIT): found}
    chosen = split or (next(iter(splits)) if len(splits) == 1 else _DEFAULT_SPLIT)
    if chosen not in splits:
        raise UserError(f"--split: expected one of {', '.join(splits)} for {name!r}, got {chosen!r}")
    return splits[chosen]


def read_rows(name: str, dataset: Any, on_bytes_read: Callable[[int], None], num_bytes: int) -> Iterator[Block]:
    """Yield the rows of a data set in blocks. Columns with images, sound or other media are omitted.

    `num_bytes` is the size of the data set's files. `on_bytes_read` receives a share of this size proportional to the
    number of rows read. Raises a `UserError` if rows cannot be read.
    """
    # Features of media have the attribute `decode`, and would be decoded. `Json` has it, too, but should be decoded.
    columns = [
        column
        for column, feature in dataset.features.items()
        if not hasattr(feature, "decode") or type(feature).__name__ == "Json"
    ]
    dataset = dataset.with_format(None).select_columns(columns)
    for begin in range(0, len(dataset), _BATCH_ROWS):
        try:
            batch = dataset[begin : begin + _BATCH_ROWS]
        except Exception as error:  # damaged files, missing libraries for nested media
            raise UserError(f"{name}, row {begin + 1}: cannot be read ({one_line_message(error)})") from error
        rows = [without_nulls(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)]
        yield Block(name, "row", list(range(begin + 1, begin + len(rows) + 1)), rows)
        on_bytes_read(num_bytes * len(rows) // len(dataset))
