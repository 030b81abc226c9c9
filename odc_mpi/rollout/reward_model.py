"""Reward models as reward functions: transformers sequence classifiers whose only output is the reward.

Reward models are frozen, and each rank has all of their parameters in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from odc_mpi.data.chat.templates import ChatRenderer, fix_time
from odc_mpi.data.encoding.encode import encode
from odc_mpi.data.examples import Conversation, PromptCompletion
from odc_mpi.data.tokenizer import load_tokenizer
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.build import is_model_directory
from odc_mpi.models.heads import ENDS_WITH_TURN

_SETTING = "rl.reward_funcs"


class RewardModel:
    """Reward function that scores completions on `device` with the reward model and tokenizer in the directory `path`.

    Raises `UserError` if the model or tokenizer cannot be loaded, weights are missing from the safetensors files, the
    model does not have exactly one output, or the padding token is unknown. For `time`, see `fix_time`.
    """

    #: Other threads would compete for the device, and torch would start its own threads for each of them.
    main_thread_only = True

    def __init__(self, path: Path, device: torch.device | str, time: str | None = None) -> None:
        if not is_model_directory(path):
            raise UserError(
                f"{_SETTING}: expected a reward model with config.json, got {path} without it: export the run with "
                "odc-mpi export, and with --merge if it has adapters"
            )
        self._location = str(path)
        self._tokenizer = load_tokenizer(path, _SETTING)
        if time:
            fix_time(self._tokenizer, time)
        try:
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises exceptions of many kinds
            raise UserError(
                f"{_SETTING}: expected a reward model, but {path} does not load: {one_line_message(error)}"
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"{_SETTING}: expected a reward model, got {path}, which stores no weights for {missing[0]}"
            )
        if model.config.num_labels != 1:
            raise UserError(
                f"{_SETTING}: expected a reward model with one label, got {path} with {model.config.num_labels}"
            )
        text = model.config.get_text_config()
        candidates = (text.pad_token_id, self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        padding = next((each for each in candidates if each is not None), None)
        if padding is None or padding < 0:  # -1 in some published configurations
            raise UserError(
                f"{_SETTING}: expected a padding token, {path} has {padding}: set pad_token_id in its config.json"
            )
        text.pad_token_id = self._padding = padding
        self._max_length: int | None = getattr(text, "max_position_embeddings", None)
        self._model = model.requires_grad_(False).eval().to(device)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return the reward of each completion. Prompts and completions are strings or lists of messages.

        Raises `ValueError` if a prompt with its completion is too long or contains a token outside the vocabulary.
        """
        rows = [torch.tensor(self._encode(*each)) for each in zip(prompts, completions, strict=True)]
        longest = max(map(len, rows))
        if self._max_length is not None and longest > self._max_length:
            raise ValueError(f"expected at most {self._max_length} tokens of prompt and completion, got {longest}")
        tokens = pad_sequence(rows, True, self._padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], True)
        vocab_size, top = self._model.get_input_embeddings().num_embeddings, int(tokens.max())
        if top >= vocab_size:
            raise ValueError(
                f"expected token ids below {vocab_size}, got {top} of the tokenizer in {self._location}: save the "
                f"model after resize_token_embeddings({top + 1}) of transformers"
            )
        device = self._model.device
        with torch.inference_mode():
            output = self._model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False)
        rewards: list[float] = output.logits[:, 0].float().tolist()
        return rewards

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenize a prompt together with its completion. Strings are tokenized in the same way as training data.

        Messages are rendered without tools and end with the end-of-turn token if the model was trained this way.
        """
        if isinstance(prompt, str):
            [[encoded]] = encode(self._tokenizer, [PromptCompletion(self._location, prompt, completion)])
            return encoded.tokens.tolist()
        renderer = ChatRenderer(self._tokenizer)
        text = renderer.render_prompt(Conversation(self._location, [*prompt, *completion]), for_generation=False)
        if getattr(self._model.config, ENDS_WITH_TURN, False):
            text = renderer.close_turn(text)
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens
