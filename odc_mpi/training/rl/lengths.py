"""Prediction of completion lengths from earlier completions of a prompt, or from the length of the prompt."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


class CompletionLengthPredictor:
    """Predicts the mean length of the completions of a prompt.

    The prediction is the mean length that was last observed for the prompt. For a new prompt, it is read from the
    regression line of completion length over prompt length. The sums of the regression are integers, so all ranks
    predict the same lengths, also after a run resumes.

    Args:
        prompt_lengths: Lengths of all prompts in tokens, int64 [prompts].
    """

    def __init__(self, prompt_lengths: npt.NDArray[np.int64]) -> None:
        self._prompt_lengths = prompt_lengths
        self.load_state_dict({})

    def observe(self, index: int, length: float) -> None:
        """Record the mean length in tokens of the completions of prompt `index`, rounded to two decimals."""
        if index in self._observed:
            self._update_sums(index, -1)
        self._observed[index] = round(100 * length)
        self._update_sums(index, 1)

    def predict(self, index: int) -> float:
        """Return the expected mean length in tokens of the completions of prompt `index`."""
        if index in self._observed:
            return self._observed[index] / 100
        prompt_length = int(self._prompt_lengths[index])
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if not spread:  # no line: all observed prompts have one length. Longer prompts first.
            return float(prompt_length)
        slope = (n * xy - x * y) / spread
        return (y / n + slope * (prompt_length - x / n)) / 100

    def state_dict(self) -> dict[str, float]:
        """Return the observed mean lengths in tokens by index of the prompt, as text. JSON-serializable."""
        return {str(index): length / 100 for index, length in self._observed.items()}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Replace all observed lengths with those in the result of `state_dict`."""
        self._observed: dict[int, int] = {}
        #: Sums over the observed prompts of 1, x, y, x * x and x * y: prompt length x, 100 * completion length y.
        self._sums = [0, 0, 0, 0, 0]
        for index, length in state_dict.items():
            self.observe(int(index), length)

    def _update_sums(self, index: int, times: int) -> None:
        x, y = int(self._prompt_lengths[index]), self._observed[index]
        self._sums = [s + times * each for s, each in zip(self._sums, (1, x, y, x * x, x * y), strict=True)]
