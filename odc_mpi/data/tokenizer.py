"""Training and loading tokenizers, and reading their files. Nothing is downloaded, and no code in files is executed.

Importing the libraries transformers and tokenizers takes seconds, so they are imported only where they are used.
"""

import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from odc_mpi.data.dataset.format import ADDITIONAL_TEMPLATES
from odc_mpi.data.dataset.reader import read_tokenizer_files
from odc_mpi.errors import UserError, one_line_message

_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.model", f"{ADDITIONAL_TEMPLATES}/*.jinja"),
)
MODEL_CONFIG = "config.json"  # its `model_type` determines the class of the tokenizer in the same directory

END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = [END_OF_TEXT, PAD, TURN_START, TURN_END]
MIN_VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)  # every byte is a token, so no text is unknown
MAX_VOCAB_SIZE = 1 << 20  # several times that of any published model; the trainer reserves memory for all tokens

# ChatML: https://github.com/openai/openai-python/blob/v0.27.8/chatml.md
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_files(location: Path, model: Path | None = None) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files in a directory or data set, keyed by relative path.

    The result is empty if there is no tokenizer. If `location` is a directory, the result also contains config.json,
    which may determine the tokenizer's class. It is read from the directory `model` or, if that is None, `location`.
    """
    if not location.is_dir():
        files = read_tokenizer_files(location)
        return {name: files[name] for name in files if name == MODEL_CONFIG or _is_tokenizer_file(name)}
    names = [path.relative_to(location).as_posix() for path in (*location.glob("*"), *location.glob("*/*.jinja"))]
    paths = {name: location / name for name in sorted(names) if _is_tokenizer_file(name)}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    config = (model or location) / MODEL_CONFIG
    return files | ({MODEL_CONFIG: config.read_bytes()} if files and config.is_file() else {})


def read_chat_template(path: Path) -> str:
    """Return the text of a chat template file. Raises a `UserError` if the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"expected a Jinja template in UTF-8 as --chat-template, got {str(path)!r} ({one_line_message(error)})"
        ) from error


def set_chat_template(tokenizer: Any, chat_template: str) -> None:
    """Replace the chat template of a tokenizer. Raises a `UserError` if Jinja cannot compile the new template."""
    from jinja2 import TemplateError, TemplateSyntaxError

    tokenizer.chat_template = chat_template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(
            f"--chat-template: expected a Jinja template, got an error in line {error.lineno}: "
            f"{one_line_message(error)}"
        ) from error
    except TemplateError:
        pass  # the template is valid, but rejects this message


def replace_chat_template(files: Mapping[str, bytes], chat_template: str) -> dict[str, bytes]:
    """Return a copy of a tokenizer's files in which `chat_template` replaces the previous chat template.

    The new template is in chat_template.jinja, which transformers prefers to templates in tokenizer_config.json.
    """
    replaced = ("chat_template", ADDITIONAL_TEMPLATES)
    others = {name: content for name, content in files.items() if not name.startswith(replaced)}
    return others | {"chat_template.jinja": chat_template.encode()}


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _FILES)


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write files to an existing directory. `files` maps their relative paths to their contents."""
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def load_tokenizer(location: Path, setting: str = "--tokenizer") -> Any:
    """Load a tokenizer with transformers from a directory written by `save_pretrained`, or from a data set.

    Raises a `UserError` if there is no fast tokenizer. Its message names `setting`, which specifies `location`.
    """
    files = tokenizer_files(location)
    return _load(location, location, setting) if files and location.is_dir() else load_files(files, location, setting)


def load_files(files: Mapping[str, bytes], location: Path = Path(), setting: str = "--tokenizer") -> Any:
    """Load a tokenizer with transformers from the contents of its files, which are keyed by file name.

    Raises the errors of `load_tokenizer`. Their messages contain `location`, where the files came from, and `setting`.
    """
    if not files:
        raise UserError(
            f"expected the directory of a tokenizer, or a data set with a tokenizer, got {str(location)!r}: "
            f"change {setting}"
        )
    with tempfile.TemporaryDirectory() as name:  # transformers reads only directories
        write_files(files, Path(name))
        return _load(Path(name), location, setting)


def _load(directory: Path, location: Path, setting: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # for invalid files, the library even raises a bare Exception
        raise UserError(
            f"expected a tokenizer in {str(location)!r}, got files that do not load ({' '.join(str(error).split())}): "
            f"change {setting}"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"expected a fast tokenizer in {str(location)!r}, got a slow one: change {setting}")
    if len(tokenizer.get_added_vocab()) == len(tokenizer):  # transformers creates an empty one
        raise UserError(
            f"expected a tokenizer in {str(location)!r}, got no vocabulary, such as tokenizer.json: change {setting}"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer with at most `vocab_size` tokens and the ChatML chat template.

    Text is split into words by Qwen2's rules, which transformers applies to any tokenizer whose directory contains
    a model of type qwen2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    bpe, qwen2 = Tokenizer(models.BPE()), Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer, bpe.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
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
    """Return the contents of the files that `save_pretrained` writes for a tokenizer, keyed by file name.

    Raises a `UserError` if they cannot be written to a temporary directory.
    """
    try:
        with tempfile.TemporaryDirectory() as name:
            tokenizer.save_pretrained(name)
            return tokenizer_files(Path(name))
    except Exception as error:  # the tokenizers library raises `Exception` if a file cannot be written
        raise UserError(
            f"cannot write the tokenizer to a temporary directory ({one_line_message(error)}): free space, or set "
            "TMPDIR to another directory"
        ) from error
