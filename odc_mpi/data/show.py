"""Display of the sequences in a data set with marked loss tokens, for finding wrong loss masks before training."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.tokenizer import load_tokenizer

_LOSS_STYLE = "bold green"
_BEGIN, _END = "[[", "]]"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but line breaks and tabs


def show_sequences(path: Path, indices: Iterable[int], console: Console) -> None:
    """Print sequences from a data set, decoded with its tokenizer. For pairs, a title precedes each answer.

    Loss tokens are green, or in double brackets if the console has no colors. Printing stops at the first index beyond
    the end of the data set. Raises a `UserError` if the data set is damaged or has no tokenizer.
    """
    tokenizer = load_tokenizer(path)
    has_colors = console.color_system is not None and not console.no_color
    with Dataset(path) as dataset:
        for i in itertools.takewhile(lambda i: i < len(dataset), indices):
            tokens, loss_mask = dataset[i]
            unit = "pair" if dataset.kind == "pairs" else "sequence"
            label = ("undesirable, ", "desirable, ")[dataset.columns["label"][i]] if dataset.kind == "labels" else ""
            text = Text(f"\n{unit} {i}: {label}{len(tokens):,} tokens, {loss_mask[1:].sum():,} with loss\n")
            for title, part, begin in _parts(dataset, i):
                text.append(title).append(_decode(tokenizer, tokens[part], loss_mask[part], begin, has_colors))
            console.print(text, highlight=False, soft_wrap=True)


def _parts(dataset: Dataset, index: int) -> Iterator[tuple[str, npt.NDArray[np.int64], int]]:
    """Yield each part of a sequence: title, token indices of its context and the part, length of the context."""
    complete = np.arange(dataset.lengths[index])
    if dataset.kind != "pairs":
        yield "", complete, 0
        return
    num_prompt, num_chosen, _ = (int(column[index]) for column in dataset.columns.values())
    prompt, chosen, rejected = np.split(complete, [num_prompt, num_prompt + num_chosen])
    yield "", prompt, 0
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        yield f"\n--- {name}: {len(answer):,} tokens\n", np.concatenate([prompt, answer]), num_prompt


def _decode(
    tokenizer: Any, tokens: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_], begin: int, has_colors: bool
) -> Text:
    """Return the text of the tokens from index `begin` on, with loss tokens marked."""
    text, end = Text(), begin
    # Decode from the first token, since some tokenizers drop a space at the beginning of a text.
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    num_decoded = len(tokenizer.decode(tokens[:begin], **options))
    for has_loss, run in itertools.groupby(loss_mask[begin:].astype(bool)):
        end += len(list(run))
        decoded = tokenizer.decode(tokens[:end], **options)
        part = _CONTROL.sub(lambda match: repr(match[0])[1:-1], decoded[num_decoded:])
        num_decoded = len(decoded)
        if has_loss:
            part = part if has_colors else f"{_BEGIN}{part}{_END}"
        text.append(part, _LOSS_STYLE if has_loss and has_colors else "")
    return text
