"""Which prompts a step generates from: the same on every rank, without communication."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from odc_mpi.data.dataset import Dataset
from odc_mpi.data.encode import end_of_turn_token
from odc_mpi.data.loader import Minibatch
from odc_mpi.data.plan.balance import Plan
from odc_mpi.data.prompts.file import PromptRow, Prompts
from odc_mpi.data.tokenizer import load_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.rollout.sample import PromptTokens


class PromptLoader:
    """An endless, resumable sequence of minibatches of prompts.

    Each data epoch shuffles the prompts anew and goes through them once; its last minibatch may be smaller. The order
    depends on the seed and the data epoch only.

    Args:
        prompts: The caller closes them.
        num_prompts: In a minibatch, over all ranks.
        seed: Of the shuffle.
        rank: This rank.
    """

    def __init__(self, prompts: Prompts, num_prompts: int, seed: int, rank: int) -> None:
        self._prompts, self._num_prompts = prompts, num_prompts
        self._seed, self._rank = seed, rank
        self._move_to(0, 0)

    def __next__(self) -> Minibatch:
        """Return the next minibatch; its plan is empty, as ranks draw what they do. Local."""
        indices = self._order[self._position : self._position + self._num_prompts]
        minibatch = Minibatch(
            data_epoch=self._data_epoch,
            position=self._position,
            indices=indices,
            num_tokens=0,
            num_input_tokens=int(self._prompts.lengths[indices].sum()),
            plan=Plan(()),
            rank=self._rank,
            dataset=cast(Dataset, self._prompts),
        )
        if self._position + len(indices) < len(self._prompts):
            self._position += len(indices)
        else:
            self._move_to(self._data_epoch + 1, 0)
        return minibatch

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next minibatch. Local; the same on every rank."""
        return {"data_epoch": self._data_epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of a `state_dict`. Local.

        Raises:
            UserError: There is no such position.
        """
        if not 0 <= state["position"] < len(self._prompts):
            raise UserError(
                f"expected a position from 0 to {len(self._prompts) - 1} in {str(self._prompts.path)!r}, got "
                f"{state['position']} from the checkpoint: set data.path to what it was trained on"
            )
        self._move_to(state["data_epoch"], state["position"])

    def _move_to(self, data_epoch: int, position: int) -> None:
        self._data_epoch, self._position = data_epoch, position
        self._order = np.random.default_rng([self._seed, data_epoch]).permutation(len(self._prompts))


class PromptText:
    """The tokenizer of prompts: what ends a completion, and what a completion reads.

    Args:
        prompts: The file, which holds the tokenizer.

    Raises:
        UserError: No token ends a completion.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._tokenizer: Any = load_tokenizer(prompts.path)
        end, turn = self._tokenizer.eos_token_id, end_of_turn_token(self._tokenizer)
        self._stop = frozenset(token for token in (end,) if token is not None)
        self._stop_of_chat = self._stop | frozenset(token for token in (turn,) if token is not None)
        if not self._stop_of_chat:
            raise UserError(
                f"{prompts.path}: expected a tokenizer with an end-of-sequence token (eos_token), got none: every "
                "completion would be cut"
            )

    def tokens(self, index: int, row: PromptRow) -> PromptTokens:
        """Return a prompt as what completions continue. Local."""
        return PromptTokens(index, row.tokens, self._stop_of_chat if row.is_chat else self._stop)

    def text(self, tokens: list[int]) -> str:
        """Return the text of a completion, without its stop token. Local."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def arguments(self, row: PromptRow, completions: list[list[int]]) -> dict[str, list[Any]]:
        """Return the arguments of reward functions for a prompt and its completions, copies of the tokens. Local."""
        texts: list[Any] = [self.text(tokens) for tokens in completions]
        if row.is_chat:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        given = {"prompts": row.prompt, **row.columns}
        own = {name: [value] * len(completions) for name, value in given.items()}
        return own | {"completions": texts, "completion_ids": [list(tokens) for tokens in completions]}
