"""How long the completions of a prompt will be: what earlier rounds tell, and the lengths of prompts."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


class CompletionLengthPredictor:
    """Expects of a prompt what its completions came to when it was last generated from.

    Of a prompt that is new, what a straight line says through the lengths of other prompts and their completions. Sums
    are integers, so that all ranks expect the same, also a rank of a run that goes on from a checkpoint.

    Args:
        prompt_lengths: Of all prompts, in tokens, int64 [prompts].
    """

    def __init__(self, prompt_lengths: npt.NDArray[np.int64]) -> None:
        self._prompt_lengths = prompt_lengths
        self.load_state_dict({})

    def observe(self, index: int, length: float) -> None:
        """Remember the mean length of the completions of a prompt, to two digits behind the point."""
        if index in self._observed:
            self._update_sums(index, -1)
        self._observed[index] = round(100 * length)
        self._update_sums(index, 1)

    def predict(self, index: int) -> float:
        """Return the expected length of the completions of a prompt, in tokens."""
        if index in self._observed:
            return self._observed[index] / 100
        prompt_length = int(self._prompt_lengths[index])
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if not spread:  # no two prompts of other lengths: the longer ones first
            return float(prompt_length)
        slope = (n * xy - x * y) / spread
        return (y / n + slope * (prompt_length - x / n)) / 100

    def state_dict(self) -> dict[str, float]:
        """Return the lengths that are known, as JSON takes them."""
        return {str(index): length / 100 for index, length in self._observed.items()}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Know the lengths of a `state_dict`, and no others."""
        self._observed: dict[int, int] = {}
        #: Of prompts that are known: how many, lengths x of prompts and y of completions, and products.
        self._sums = [0, 0, 0, 0, 0]
        for index, length in state_dict.items():
            self.observe(int(index), length)

    def _update_sums(self, index: int, times: int) -> None:
        x, y = int(self._prompt_lengths[index]), self._observed[index]
        self._sums = [s + times * each for s, each in zip(self._sums, (1, x, y, x * x, x * y), strict=True)]
