"""What `gpu_models.py` compares odc_mpi with: models of transformers and peft in plain torch, with padded batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_step import Plain
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from odc_mpi.data.microbatch import IGNORED_LABEL
from odc_mpi.models.decoding import Prompt
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.settings import Config

#: Sequences of a padded batch.
BATCH = 8


def load(path: Path | str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a model with transformers, without defaults for generation."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = transformers.GenerationConfig()
    return model.to(device)


def generate(model: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
    """Return completions of prompts, generated in one batch; `settings` are those of `GenerationConfig`."""
    rows = [torch.tensor(list(tokens)) for tokens in prompts]
    tokens = pad_sequence(rows, True, padding_side="left").to(model.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side="left").to(model.device)
    config = transformers.GenerationConfig(pad_token_id=0, use_cache=True, **settings)
    with torch.no_grad():
        done = model.generate(tokens, attention_mask=mask, generation_config=config)
    completions: list[list[int]] = done[:, tokens.shape[1] :].tolist()
    return completions


def greedy(model: Any, prompts: Sequence[Prompt], num_tokens: int) -> list[list[int]]:
    """Return the most likely tokens after each prompt."""
    return generate(model, [prompt.tokens for prompt in prompts], max_new_tokens=num_tokens, do_sample=False)


class Padded(Plain):
    """Contender that trains a model of transformers, or of peft, on batches of `BATCH` padded sequences.

    `loader` yields minibatches with `dataset`, `indices`, `num_tokens` and `num_input_tokens`; by default it is that of
    `inputs`. Adapters have the initial values of those in `inputs`, which have the same names.
    """

    def __init__(self, config: Config, inputs: Inputs, device: torch.device, loader: Any = None) -> None:
        assert config.model.path is not None
        dtype = torch.float32 if config.lora.r is None else getattr(torch, config.model.param_dtype)
        module = load(config.model.path, dtype, device)
        if config.lora.r is not None:
            module = _with_adapters(module, config, inputs)
        super().__init__(config, loader or inputs.sequence_loader, device, module.train())

    @override
    def _run(self, minibatch: Any) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = [minibatch.dataset[i] for i in minibatch.indices]  # tokens, and which of them are trained
        for start in range(0, len(rows), BATCH):
            part = [tuple(map(torch.from_numpy, row)) for row in rows[start : start + BATCH]]
            given = {
                "input_ids": pad_sequence([tokens for tokens, _ in part], True),
                "attention_mask": pad_sequence([torch.ones_like(tokens) for tokens, _ in part], True),
                "labels": pad_sequence(
                    [tokens.where(trained, IGNORED_LABEL) for tokens, trained in part], True, IGNORED_LABEL
                ),
            }
            moved = {name: value.to(self._device) for name, value in given.items()}
            loss = self._model(**moved, use_cache=False, num_items_in_batch=minibatch.num_tokens).loss
            loss.backward()
            total += loss.detach()
        return total


def _with_adapters(module: Any, config: Config, inputs: Inputs) -> nn.Module:
    import peft

    lora = config.lora
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    adapted = peft.get_peft_model(module, settings).get_base_model()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                values = inputs.model.weights.read(name, 0, parameter.numel())
                parameter.copy_(values.view(parameter.shape))
    return adapted  # type: ignore[no-any-return]
