"""Opening, batching and tokenization of prompts, without communication."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.side_files import end_tokens
from odc_mpi.data.chat.templates import fix_time, set_variables
from odc_mpi.data.encoding.encode import end_of_turn_token
from odc_mpi.data.loader import PlannedMinibatch, ShuffledSampler
from odc_mpi.data.plan.balance import Plan
from odc_mpi.data.prompt_dataset import PromptDataset, PromptRecord
from odc_mpi.data.tokenizer import load_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.load import find_checkpoint, load_run_tokenizer
from odc_mpi.training.inputs import Inputs, check_vocabulary
from odc_mpi.training.settings import Config


def open_prompts(config: Config, meta_model: MetaModel, prompt_time: str | None) -> Inputs:
    """Open the prompts, and check that they match the model and that completions fit in a microbatch."""
    setting, tokenizer_path = (
        ("rl.tokenizer", config.rl.tokenizer) if config.rl.tokenizer else ("model.path", config.model.path)
    )
    assert tokenizer_path is not None, "config.load requires one of them"
    tokenizer = _load_tokenizer(Path(tokenizer_path), setting)
    set_variables(tokenizer, config.rl.chat_template_kwargs or {})
    if prompt_time:
        fix_time(tokenizer, prompt_time)
    prompts, evaluation = (
        None
        if path is None
        else _validate_prompts(setting, PromptDataset(path, tokenizer, setting), config, meta_model)
        for setting, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path))
    )
    assert prompts is not None, "config.load requires data.path"
    loader = PromptLoader(prompts, config.data.minibatch_sequences // config.rl.num_generations, config.run.seed)
    return Inputs(prompts, meta_model, loader, evaluation, prompt_time=prompt_time)


def _validate_prompts(setting: str, prompts: PromptDataset, config: Config, meta_model: MetaModel) -> PromptDataset:
    check_vocabulary(setting, prompts, config.model, meta_model)
    index, length = int(prompts.lengths.argmax()), config.rl.max_completion_length
    longest = int(prompts.lengths[index])
    positions = getattr(meta_model.module.config, "max_position_embeddings", None)
    for name, limit in (
        ("the model's max_position_embeddings", positions),
        ("data.max_tokens_per_microbatch", config.data.max_tokens_per_microbatch),
    ):
        if limit is not None and longest + length > limit:
            raise UserError(
                f"rl.max_completion_length: {prompts.locations[index]}: a prompt of {longest} tokens and a completion "
                f"of {length} exceed {name}, {limit}: lower it, remove the prompt, or raise the limit"
            )
    return prompts


def _load_tokenizer(path: Path, setting: str) -> Any:
    if checkpoint := find_checkpoint(path):
        with checkpoint:
            return load_run_tokenizer(checkpoint, remedy="rl.tokenizer")
    return load_tokenizer(path, setting)


class PromptLoader(ShuffledSampler):
    """Endless, resumable iterator over minibatches of prompts for all ranks."""

    def __next__(self) -> PlannedMinibatch:
        """Return the next minibatch, without a rank or a plan, because ranks claim prompts at run time."""
        position, indices = self._next_indices()
        return PlannedMinibatch(**position, indices=indices, plan=Plan(()), rank=0, dataset=self._dataset)

    def upcoming(self, count: int) -> list[PlannedMinibatch]:
        """Return the next minibatches, without advancing."""
        state = self.state_dict()
        minibatches = [next(self) for _ in range(count)]
        if count:
            self.load_state_dict(state)
        return minibatches


def predict_lengths(
    indices: Sequence[int], prompt_lengths: npt.NDArray[np.int64], observed: Mapping[int, float]
) -> list[float]:
    """Predict the mean completion length, in tokens, of each prompt in `indices`.

    `prompt_lengths` contains the lengths of all prompts. `observed` maps prompt indices to completion lengths. The
    prediction is the observed length, if any, or else a linear regression on prompt lengths or, if all observed prompts
    are equally long, the prompt length. All ranks make the same predictions because the regression's sums are exact.
    """
    x = [int(prompt_lengths[index]) for index in observed]
    slope, intercept = 1.0, 0.0
    if len(set(x)) > 1:
        slope, intercept = statistics.linear_regression(x, list(observed.values()))
    return [observed.get(index, intercept + slope * int(prompt_lengths[index])) for index in indices]


def longest_first(lengths: Sequence[float]) -> list[int]:
    """Return the indices of `lengths`, actual or expected numbers of tokens, from the longest to the shortest."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def longest_first_batches(lengths: Sequence[float], num_shares: int, max_prompts: int) -> list[list[int]]:
    """Return batches of prompts to decode together, in order of decreasing length.

    Prompts are given by their indices in `lengths`. A batch has at least one prompt, at most `max_prompts`, and at most
    the number of prompts divided by `num_shares`, rounded up.
    """
    order = longest_first(lengths)
    together = max(1, min(max_prompts, -(-len(lengths) // num_shares)))
    return [order[begin : begin + together] for begin in range(0, len(lengths), together)]


class PromptCodec:
    """Prepares prompts for sampling and completions for rewards. Raises `UserError` if there are no stop tokens."""

    def __init__(self, prompts: PromptDataset, model_path: str | None) -> None:
        self._tokenizer: Any = prompts.tokenizer
        turn = end_of_turn_token(self._tokenizer)
        self._stop = end_tokens(self._tokenizer, Path(model_path) if model_path else None)
        self._stop_of_chat = [*self._stop, *([] if turn is None or turn in self._stop else [turn])]
        if not self._stop_of_chat:
            raise UserError(
                f"{prompts.path}: expected a tokenizer with an end-of-sequence token (eos_token), got none: every "
                "completion would be truncated"
            )

    def encode(self, index: int, record: PromptRecord) -> Prompt:
        """Return a prompt with its index, its tokens, and the tokens that stop its completions."""
        return Prompt(index, record.tokens, self._stop_of_chat if record.is_chat else self._stop)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of a completion without special tokens, such as the stop token."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def reward_kwargs(self, record: PromptRecord, completions: list[list[int]]) -> dict[str, list[Any]]:
        """Return the keyword arguments for reward functions. Each is a list with one item per completion."""
        texts: list[Any] = [self.decode(tokens) for tokens in completions]
        if record.is_chat:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {"prompts": record.prompt, **record.columns}
        repeated = {name: [value] * len(completions) for name, value in columns.items()}
        return repeated | {"completions": texts, "completion_ids": [list(tokens) for tokens in completions]}
