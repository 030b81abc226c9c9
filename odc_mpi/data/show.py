"""Display of the sequences in a data set with marked loss tokens, for finding wrong loss masks before training."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.prompt_group import Answer, read_group
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
            group, size = read_group(dataset, i), f"{dataset.lengths[i]:,} tokens"
            unit = "pair" if dataset.kind == "pairs" else "sequence"
            label = ("undesirable, ", "desirable, ")[dataset.columns["label"][i]] if dataset.kind == "labels" else ""
            text = Text(f"\n{unit} {i}: {label}{size}, {dataset.num_trained_tokens[i]:,} with loss\n")
            prompt = Answer(group.prompt, np.zeros(len(group.prompt), np.bool_))
            text.append(_decode(tokenizer, group.prompt[:0], prompt, has_colors=has_colors))
            for name, answer in zip(("chosen", "rejected"), group.answers, strict=False):
                if unit == "pair":
                    text.append(f"\n--- {name}: {len(answer.tokens):,} tokens\n")
                text.append(_decode(tokenizer, group.prompt, answer, has_colors=has_colors))
            console.print(text, highlight=False, soft_wrap=True)


def _decode(tokenizer: Any, context: npt.NDArray[np.integer], part: Answer, *, has_colors: bool) -> Text:
    """Return the text of a part that follows the tokens in `context`, with loss tokens marked."""
    # Decode from the first token, since some tokenizers drop a space at the beginning of a text.
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    text, end, tokens = Text(), len(context), np.concatenate([context, part.tokens])
    num_decoded = len(tokenizer.decode(context, **options))
    for has_loss, run in itertools.groupby(part.loss_mask):
        end += len(list(run))
        decoded = tokenizer.decode(tokens[:end], **options)
        run_text = _CONTROL.sub(lambda match: repr(match[0])[1:-1], decoded[num_decoded:])
        num_decoded = len(decoded)
        if has_loss:
            run_text = run_text if has_colors else f"{_BEGIN}{run_text}{_END}"
        text.append(run_text, _LOSS_STYLE if has_loss and has_colors else "")
    return text
