"""A prompt with its answers, as `prepare` writes it, and as recipes train on it.

A pair is a group of two answers, the chosen one and the rejected one. An answer with a label is a group of its own. In
a rollout, the answers are sampled completions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.reader import Dataset


class Answer(NamedTuple):
    """An answer to a prompt.

    Attributes:
        tokens: Tokens of the answer, an array of integers `[length]` with at least one element.
        loss_mask: True for each loss token, bool `[length]`.
        columns: Named values, such as an advantage or log-probabilities. Each is a NumPy scalar or an array `[length]`.
    """

    tokens: npt.NDArray[np.integer]
    loss_mask: npt.NDArray[np.bool_]
    columns: Mapping[str, npt.NDArray] = {}

    def part(self, begin: int | None, end: int | None) -> "Answer":
        """Return tokens `begin:end` with their loss mask and columns."""
        columns = {name: value[begin:end] if value.ndim else value for name, value in self.columns.items()}
        return Answer(self.tokens[begin:end], self.loss_mask[begin:end], columns)


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with its answers, all of which have the same columns.

    Attributes:
        index: Index of the prompt or the pair in its data set.
        prompt: Tokens of the prompt, an array of integers with at least one element.
    """

    index: int
    prompt: npt.NDArray[np.integer]
    answers: Sequence[Answer]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt and all answers."""
        return len(self.prompt) + sum(len(answer.tokens) for answer in self.answers)

    def split(self, max_tokens: int) -> Iterator["PromptGroup"]:
        """Yield the group in parts of at most `max_tokens` tokens, but at least one answer, which repeat the prompt."""
        rest = self.answers
        while rest:
            totals = np.cumsum([len(self.prompt), *(len(answer.tokens) for answer in rest)])
            count = max(1, int((totals <= max_tokens).sum()) - 1)
            yield replace(self, answers=rest[:count])
            rest = rest[count:]

    def to_bytes(self) -> bytes:
        """Return the group as a line of JSON, which describes its arrays, followed by the arrays."""
        names = list(self.answers[0].columns)
        arrays: list[npt.NDArray] = [self.prompt]
        for answer in self.answers:
            arrays += [answer.tokens, answer.loss_mask, *(answer.columns[name] for name in names)]
        header = json.dumps([self.index, names, [(array.dtype.str, array.shape) for array in arrays]])
        return header.encode() + b"\n" + b"".join(array.tobytes() for array in arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> "PromptGroup":
        """Return the group that `to_bytes` has converted to `content`. Its arrays are read-only."""
        header, _, content = content.partition(b"\n")
        index, names, kinds = json.loads(header)
        arrays: list[npt.NDArray] = []
        for dtype, shape in kinds:
            arrays.append(np.ndarray(shape, dtype, content, sum(array.nbytes for array in arrays)))
        prompt, *rest = arrays
        answers = [
            Answer(tokens, loss_mask, dict(zip(names, columns, strict=True)))
            for tokens, loss_mask, *columns in zip(*[iter(rest)] * (2 + len(names)), strict=True)
        ]
        return cls(index, prompt, answers)


def read_group(dataset: Dataset, index: int) -> PromptGroup:
    """Read a prompt with its answers from a data set of any kind. A plain sequence is an answer without a prompt.

    An answer with a label has a column `label`, a bool: whether it is desirable.
    """
    tokens, loss_mask = dataset[index]
    columns = {name: values[index] for name, values in dataset.columns.items()}
    label = {"label": np.array(columns["label"] == 1)} if "label" in columns else {}
    num_prompt = columns.get("num_prompt_tokens", 0)
    bounds = [num_prompt, *(num_prompt + columns[name] for name in ("num_chosen_tokens",) if name in columns)]
    (prompt, *answers), (_, *loss_masks) = np.split(tokens, bounds), np.split(loss_mask, bounds)
    parts = zip(answers, loss_masks, strict=True)
    return PromptGroup(index, prompt, [Answer(answer, loss, label) for answer, loss in parts])
