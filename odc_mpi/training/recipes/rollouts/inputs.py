"""Opening the prompts of a GRPO run."""

from pathlib import Path
from typing import Any

from odc_mpi.data.chat.templates import fix_time, set_variables
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.data.tokenizer import load_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.load import find_checkpoint, load_run_tokenizer
from odc_mpi.training.inputs import Inputs, check_vocabulary
from odc_mpi.training.recipes.rollouts.prompts import PromptLoader
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
