"""Display of sequences of a data set, with the loss tokens marked: a wrong loss mask is seen before training."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.tokenizer import load_tokenizer

_LOSS_STYLE = "bold green"
_BEGIN, _END = "[[", "]]"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but line breaks and tabs


def show_sequences(path: Path, indices: Iterable[int], console: Console) -> None:
    """Print sequences of a data set, decoded with its tokenizer.

    Loss tokens are printed in green, and between double brackets if the console has no colors.

    Args:
        path: Data set.
        indices: Indices of the sequences. Those beyond the end of the data set are left out.

    Raises:
        UserError: The data set is damaged, or has no tokenizer.
    """
    tokenizer = load_tokenizer(path)
    has_colors = console.color_system is not None and not console.no_color
    with Dataset(path) as dataset:
        for i in itertools.takewhile(lambda i: i < len(dataset), indices):
            tokens, loss_mask = dataset[i]
            text, num_decoded = Text(f"\nsequence {i}: {len(tokens):,} tokens, {loss_mask[1:].sum():,} with loss\n"), 0
            end = 0
            for has_loss, run in itertools.groupby(loss_mask.astype(bool)):
                end += len(list(run))
                # The complete beginning is decoded, since some tokenizers drop a blank at the beginning of a text.
                decoded = tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
                part = _CONTROL.sub(lambda match: repr(match[0])[1:-1], decoded[num_decoded:])
                num_decoded = len(decoded)
                if has_loss:
                    part = part if has_colors else f"{_BEGIN}{part}{_END}"
                text.append(part, _LOSS_STYLE if has_loss and has_colors else "")
            console.print(text, highlight=False, soft_wrap=True)
