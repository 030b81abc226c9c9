"""Tokenizers: trained, loaded, and as files.

A tokenizer comes from a directory that `save_pretrained` wrote, or out of a data set, which holds a copy of the files
of its tokenizer (`dataset`). Never from the network, and no code of a tokenizer runs. No communication.

transformers and tokenizers are imported where they are used: they take seconds to load, and a mistake in the arguments
should not.
"""

import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from odc_mpi.data.dataset import read_tokenizer_files
from odc_mpi.errors import UserError

_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.model"),
)

END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = [END_OF_TEXT, PAD, TURN_START, TURN_END]
MIN_VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)  # every byte is a token, so that nothing is unknown

# ChatML: https://github.com/openai/openai-python/blob/v0.27.8/chatml.md
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_files(location: Path) -> dict[str, bytes]:
    """Read the files of a tokenizer.

    Args:
        location: The tokenizer's directory, or a data set.

    Returns:
        The content of each file under its name; empty if there is no tokenizer.

    Raises:
        OSError: A file of the directory cannot be read.
    """
    if not location.is_dir():
        return {name: content for name, content in read_tokenizer_files(location).items() if _is_tokenizer_file(name)}
    paths = [path for path in sorted(location.iterdir()) if _is_tokenizer_file(path.name) and path.is_file()]
    return {path.name: path.read_bytes() for path in paths}


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _FILES)


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files of a tokenizer into a directory, for transformers."""
    for name, content in files.items():
        (directory / name).write_bytes(content)


def load_tokenizer(location: Path, setting: str = "--tokenizer") -> Any:
    """Load a tokenizer from a local directory or out of a data set.

    Args:
        location: A directory that `save_pretrained` wrote, or a data set that holds a tokenizer.
        setting: The setting or option that names it, for messages.

    Returns:
        A fast tokenizer of transformers.

    Raises:
        UserError: There is no tokenizer, its files do not load, or it has no fast implementation.
    """
    if location.is_dir():
        return _load(location, location, setting)
    files = tokenizer_files(location)
    if not files:
        raise UserError(
            f"expected a tokenizer's directory or a data set with a tokenizer, got {str(location)!r}, which is none: "
            f"change {setting}"
        )
    return load_files(files, location, setting)


def load_files(files: Mapping[str, bytes], location: Path = Path(), setting: str = "--tokenizer") -> Any:
    """Load a tokenizer from the content of its files.

    Args:
        files: Content by name.
        location: Where they come from, for messages.
        setting: The setting or option that names it, for messages.

    Raises:
        UserError: The files do not load, or there is no fast implementation.
    """
    with tempfile.TemporaryDirectory() as name:  # transformers reads directories only
        write_files(files, Path(name))
        return _load(Path(name), location, setting)


def _load(directory: Path, location: Path, setting: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything, down to bare Exception, for files it cannot use
        raise UserError(
            f"expected a tokenizer in {str(location)!r}, got files that do not load ({' '.join(str(error).split())}): "
            f"change {setting}"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"expected a fast tokenizer in {str(location)!r}, got a slow one: change {setting}")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer with a chat template.

    Args:
        texts: The training texts.
        vocab_size: The most tokens of the vocabulary, at least `MIN_VOCAB_SIZE`.

    Returns:
        A fast tokenizer of transformers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def serialize_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Return the files that `save_pretrained` writes for a tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        return tokenizer_files(Path(name))
