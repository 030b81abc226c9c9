"""Names, types, digests and errors of data sets."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.errors import UserError, one_line_message

FORMAT = "odc_mpi.dataset"
VERSION = 2
CHUNK = 16_384  # elements; a random read fetches whole chunks, so about 80 KB for tokens and mask
TOKENIZER_GROUP = "tokenizer"
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # folder of a tokenizer, and group in `TOKENIZER_GROUP`
REPORT = "report"  # not an attribute, since those above 4 KiB have no checksums
#: HDF5 datasets in a data set, and their types.
TYPES = {
    "tokens": np.uint32,
    "loss_mask": np.uint8,
    "offsets": np.int64,
    "num_trained_tokens": np.int32,
    "checksums": np.uint32,
}


#: Kinds of data sets that `prepare` writes: plain sequences, pairs of answers, and answers with labels.
Kind = Literal["sequences", "pairs", "labels"]
#: Plural noun for the contents of data sets of each kind.
UNITS: dict[Kind, str] = {"sequences": "sequences", "pairs": "pairs", "labels": "labeled answers"}
#: Columns of data sets of each kind, HDF5 datasets of type int32 with a number per sequence. Prompts and answers have
#: at least one token, and each answer of a pair at least one loss token. An answer with a label begins with one.
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "sequences": (),
    "pairs": ("num_prompt_tokens", "num_chosen_tokens", "num_chosen_loss_tokens"),
    "labels": ("num_prompt_tokens", "label"),  # 1 if the answer is desirable, and 0 if it is not
}


class DamagedDatasetError(UserError):
    """Error raised if a data set does not contain the data that was written."""

    def __init__(self, path: Path, description: str) -> None:
        super().__init__(
            f"the data set {str(path)!r} is damaged: {description}: prepare it again, or restore it from a copy"
        )


@contextmanager
def hdf5_errors(path: Path, description: str) -> Iterator[None]:
    """Context manager that converts exceptions that h5py raises for a damaged file to a `DamagedDatasetError`.

    `description` is the name of the data being read, such as "sequence 3".
    """
    try:
        yield
    except UserError:
        raise
    # h5py raises various types for damaged files.
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DamagedDatasetError(path, f"{description} cannot be read ({one_line_message(error)})") from error


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Return the hexadecimal SHA-256 digest of a vocabulary, which maps tokens to their IDs."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def sequence_checksum(tokens: npt.NDArray[np.uint32], loss_mask: npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32 of a sequence's tokens, uint32 [length], followed by its loss mask, uint8 [length]."""
    return crc32(_little_endian(loss_mask), crc32(_little_endian(tokens)))


def content_digest(*arrays: npt.NDArray) -> str:
    """Return the hexadecimal SHA-256 digest of the concatenated arrays. The attribute `content` is such a digest."""
    return hashlib.sha256(b"".join(_little_endian(array) for array in arrays)).hexdigest()


def _little_endian(array: npt.NDArray) -> bytes:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()


def encode_text(text: str) -> np.bytes_:
    """Convert text to a value for a fixed-length attribute. Characters that UTF-8 cannot represent are escaped."""
    return np.bytes_(text.encode(errors="backslashreplace") or b"\0")


def read_attribute(attributes: h5py.AttributeManager, name: str, kind: type) -> Any:
    """Read an attribute, which is a fixed-length string if `kind` is `str`, or an integer if `kind` is `int`.

    Raises a `KeyError` if the attribute is missing, or a `TypeError` if it has a different type.
    """
    value = attributes[name]
    if kind is str and isinstance(value, bytes):
        return value.decode()
    if kind is int and isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"the attribute {name!r} is not {'an integer' if kind is int else 'a text of fixed length'}")


def has_signature(file: h5py.File) -> bool:
    """Return True if the attribute `format` identifies the file as a data set written by any version of `prepare`."""
    value = file.attrs.get("format")
    return value.decode(errors="replace") == FORMAT if isinstance(value, bytes) else bool(np.all(value == FORMAT))
