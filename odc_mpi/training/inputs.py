"""Inputs of a run (data sets, model and loader), which are opened and checked without communication."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.side_files import read_tokenizer_files
from odc_mpi.checkpoint.state import CheckpointWeights, require_model, restore_buffers
from odc_mpi.comm.context_parallel.kv_windows import KVSizes
from odc_mpi.data.dataset.format import vocabulary_digest
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import WHOLE, Loader, Part, ShuffledSampler
from odc_mpi.data.plan.balance import check_fit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.data.tokenizer import load_files, load_tokenizer, tokenizer_files
from odc_mpi.errors import UserError
from odc_mpi.models import build as models
from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.context_parallel_attention import attention_shape
from odc_mpi.models.frozen_prefix import Prefix, find_prefix
from odc_mpi.models.heads import CAUSAL_LM, Task
from odc_mpi.models.load import find_checkpoint, load_start
from odc_mpi.models.quantization.quantize import quantize
from odc_mpi.training.recipes import names_for, recipe_of
from odc_mpi.training.settings import Config, DataConfig, ModelConfig

#: Name of the tokenizer file in a transformers model directory.
_TOKENIZER = "tokenizer.json"
#: For each kind of data set, what it contains, and which records `prepare` needs for it.
_KINDS = {
    "sequences": (
        "sequences without preferences",
        "only what is to be imitated: of pairs with --columns messages=chosen or completion=chosen, of labeled answers "
        "the lines with the label true",
    ),
    "pairs": ("pairs of a chosen and a rejected answer", "records with the fields chosen and rejected"),
    "labels": ("answers with labels", "records with the fields prompt, completion and label, which is true or false"),
}
#: Data set of a run: prepared sequences, or prompts.
TrainingData = Dataset | PromptDataset


@dataclass
class Inputs:
    """Checked inputs of a run. The model is on the meta device, and has adapters if the run trains them."""

    dataset: TrainingData
    model: models.MetaModel
    loader: ShuffledSampler
    evaluation: TrainingData | None = None
    #: Sizes of the key and value buffers, a string that explains why no sequence can be split, or None if
    #: `data.context_parallel` is off.
    context_parallel: KVSizes | str | None = None
    #: Time for chat templates that render the current date (see `fix_time`), if the data are prompts.
    prompt_time: str | None = None
    #: Part of each minibatch and of the held-out data on which the ranks of the run work.
    part: Part = WHOLE
    #: Frozen layers that are computed once, or None.
    prefix: Prefix | None = None

    @property
    def datasets(self) -> dict[str, TrainingData]:
        """Data sets, keyed by the setting that contains their path: `data.path` and, if set, `data.eval_path`."""
        datasets = {"data.path": self.dataset}
        return datasets if self.evaluation is None else datasets | {"data.eval_path": self.evaluation}

    @property
    def sequence_loader(self) -> Loader:
        """Loader of sequences. Raises `UserError` if the objective trains on prompts instead."""
        if isinstance(self.loader, Loader):
            return self.loader
        raise UserError(f"run.objective: expected {names_for('sequences')}, which trains on sequences: set it to that")

    def close(self) -> None:
        """Close the data set files."""
        for data in self.datasets.values():
            if isinstance(data, Dataset):
                data.close()


def open_inputs(config: Config, rank: int, size: int, part: Part = WHOLE, prompt_time: str | None = None) -> Inputs:
    """Open the data sets, build this rank's loader and the model without its weights, and check that they match.

    `part` is the part of each minibatch and of the held-out data on which the `size` ranks work. Raises `UserError` if
    the settings, data and model do not match, or if a file cannot be used.
    """
    recipe = recipe_of(config)
    meta_model = build_model(config.model, config.run.seed, rank, size, recipe.task)
    has_router_loss = getattr(meta_model.module.config.get_text_config(), "output_router_logits", False)
    if has_router_loss and not recipe.trains_routers:
        raise UserError(
            f"run.objective: {recipe.name} has no loss of routers, but the model has output_router_logits: set "
            "model.config.output_router_logits to false"
        )
    reason = meta_model.packing.unpacked_reason if recipe.data != "prompts" else "completions differ in each step"
    if reason and config.model.cache_frozen_prefix:
        raise UserError(f"model.cache_frozen_prefix: expected false with this model and objective, got true: {reason}")
    if recipe.data == "prompts":
        return recipe.open_prompts(config, _with_adapters(meta_model, config), prompt_time)
    dataset = _open_dataset("data.path", config.data.path, config, meta_model)
    recipe.adapt_model(meta_model, dataset)
    context_parallel = _plan_context_parallel(config, meta_model, dataset, size)
    meta_model = _with_adapters(meta_model, config)
    prefix = find_prefix(meta_model.module) if config.model.cache_frozen_prefix else None
    loader = Loader(
        dataset,
        minibatch_sequences=config.data.minibatch_sequences,
        max_tokens_per_microbatch=config.data.max_tokens_per_microbatch,
        balance=config.data.balance,
        seed=config.run.seed,
        rank=rank,
        size=size,
        cost=initial_cost_model(config.data, meta_model),
        context_parallel=isinstance(context_parallel, KVSizes),
        exact=config.run.exact,
        packs=meta_model.packing.packs,
        rows=recipe.data == "sequences" and meta_model.packing.pads_rows,
        part=part,
    )
    evaluation = None
    if config.data.eval_path is not None:
        evaluation = _open_dataset("data.eval_path", config.data.eval_path, config, meta_model)
        check_fit(evaluation.lengths[: config.data.eval_sequences or None], config.data.max_tokens_per_microbatch)
        num_evaluated = min(len(evaluation), config.data.eval_sequences or len(evaluation))
        if num_evaluated < part.count:
            raise UserError(
                f"data.eval_path: expected a sequence for each of {part.count} islands, got {num_evaluated}: hold out "
                "more data, raise data.eval_sequences, or set islands.by to larger islands"
            )
    return Inputs(dataset, meta_model, loader, evaluation, context_parallel, part=part, prefix=prefix)


def _plan_context_parallel(
    config: Config, meta_model: models.MetaModel, dataset: Dataset, size: int
) -> KVSizes | str | None:
    """Return `Inputs.context_parallel` for `size` ranks. `meta_model` must lack adapters."""
    if config.data.context_parallel == "off":
        return None
    if size == 1:
        return "context parallelism needs at least 2 ranks"
    if not meta_model.packing.packs:
        return f"the model does not pack: {meta_model.packing.unpacked_reason}"
    longest = int(dataset.lengths.max())
    try:
        num_layers, token_numel = attention_shape(meta_model.module, longest)
    except ContextParallelUnsupportedError as error:
        return f"{type(meta_model.module).__name__} does not support it: {error}"
    # With adapters, which are float32, a layer may compute in float32.
    narrow = config.model.param_dtype == "bfloat16" and config.lora.r is None
    max_chunk_tokens = min(longest, config.data.max_tokens_per_microbatch)
    return KVSizes(num_layers, token_numel * (2 if narrow else 4), max_chunk_tokens, longest - 1)


def _open_dataset(setting: str, path: str, config: Config, meta_model: models.MetaModel) -> Dataset:
    dataset, recipe = Dataset(path, setting), recipe_of(config)
    if recipe.data == "sequences" and dataset.kind == "labels" and dataset.columns["label"].all():
        dataset.kind = "sequences"  # answers that are all desirable can be imitated
    if dataset.kind != recipe.data:
        found, _ = _KINDS[dataset.kind]
        _, remedy = _KINDS[recipe.data]
        raise UserError(
            f"{setting}: {path} has {found}, but run.objective is {recipe.name}: set it to {names_for(dataset.kind)}, "
            f"or prepare {remedy}"
        )
    check_vocabulary(setting, dataset, config.model, meta_model)
    longest = dataset.num_positions
    positions = getattr(meta_model.module.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise UserError(
            f"{setting}: {path} has a sequence of {longest} tokens, the model's max_position_embeddings is "
            f"{positions}: prepare the data with --max-length {positions}"
        )
    return dataset


def initial_cost_model(config: DataConfig, meta_model: models.MetaModel) -> CostModel:
    """Return the cost model to use before any times are measured. For `data.cost: fitted`, it is the `flops` model."""
    return CostModel() if config.cost == "linear" else meta_model.flops


def training_flops(meta_model: models.MetaModel, trained_fraction: float) -> CostModel:
    """Return a model of a sequence's FLOPs: per token, 6 per trainable and 4 per frozen parameter, plus attention."""
    return replace(meta_model.flops, linear=meta_model.flops.linear * (2 + trained_fraction) / 3)


def _vocabulary_remedy(remedy: str, path: str | None, size: int) -> str:
    # The weights of a model on disk fix the size of its embedding.
    if path is None:
        return f"{remedy}, or raise model.config.vocab_size to {size}"
    return f"{remedy}, or save the model after resize_token_embeddings({size}) of transformers"


def check_vocabulary(setting: str, dataset: TrainingData, model: ModelConfig, meta_model: models.MetaModel) -> None:
    """Raise `UserError` if the tokens in a data set are not those of the model."""
    path = model.path
    tokenizer = find_tokenizer(Path(path), "model.path") if path is not None and dataset.vocabulary else None
    action, remedy = "prepared", "prepare it with the model's own tokenizer"
    if isinstance(dataset, PromptDataset):
        action, remedy = "tokenized", "set rl.tokenizer to the model's own tokenizer"
    # Without the model's tokenizer, only the vocabulary sizes can be compared. With it, tokens beyond the embedding are
    # allowed unless the data contains them.
    if dataset.vocab_size > meta_model.vocab_size and tokenizer is None:
        raise UserError(
            f"{setting}: {dataset.path} was {action} with a tokenizer of {dataset.vocab_size} tokens, the model "
            f"has {meta_model.vocab_size}: {_vocabulary_remedy(remedy, path, dataset.vocab_size)}"
        )
    if dataset.max_token_id >= meta_model.vocab_size:
        size = max(dataset.vocab_size, dataset.max_token_id + 1)
        raise UserError(
            f"{setting}: {dataset.path} contains the token id {dataset.max_token_id}, the model has "
            f"{meta_model.vocab_size} tokens: {_vocabulary_remedy(remedy, path, size)}"
        )
    if path is not None and isinstance(dataset, Dataset):
        files = [tokenizer_files(Path(each)).get(_TOKENIZER) for each in (path, dataset.path)]
        if files[0] is not None and files[0] == files[1]:
            return  # loaded next to config.json, some families have more tokens (Qwen2Tokenizer)
    if tokenizer is not None and vocabulary_digest(tokenizer.get_vocab()) != dataset.vocabulary:
        raise UserError(
            f"{setting}: {dataset.path} was {action} with a tokenizer that differs from that in model.path, {path}: "
            f"{remedy}"
        )


def find_tokenizer(path: Path, setting: str) -> Any:
    """Return the tokenizer of a model in a directory or a run, or None if there is none. Errors name `setting`."""
    if checkpoint := find_checkpoint(path):
        with checkpoint:
            files = read_tokenizer_files(checkpoint.manifest.metadata["config"], None)
        return load_files(files, path, setting) if _TOKENIZER in files else None
    return load_tokenizer(path, setting) if (path / _TOKENIZER).is_file() else None


def _with_adapters(meta_model: models.MetaModel, config: Config) -> models.MetaModel:
    if config.lora.r is None:
        if meta_model.quantization:
            raise UserError("model.path: the weights are quantized, so only adapters can be trained: set lora.r")
        return meta_model
    if meta_model.quantization and config.model.compile:
        raise UserError("model.compile: expected false, because the weights in model.path are quantized, got true")
    # Imported late: peft takes a second.
    from odc_mpi.models.adapters.add import add_adapters

    names = {"alpha": "lora_alpha", "dropout": "lora_dropout"}  # in peft; the others are equal
    settings = {names.get(name, name): value for name, value in vars(config.lora).items()}
    meta_model = add_adapters(meta_model, settings, config.run.seed, getattr(torch, config.model.param_dtype))
    if checkpoint := meta_model.checkpoint:
        require_model(checkpoint, meta_model.module)
        restore_buffers(meta_model.module, checkpoint)
        return replace(meta_model, weights=CheckpointWeights(checkpoint, meta_model.weights))
    return meta_model


def build_model(
    config: ModelConfig, seed: int, rank: int = 0, size: int = 1, task: Task = CAUSAL_LM
) -> models.MetaModel:
    """Build the model on the meta device, without adapters. If it has any, each rank verifies a share of their base."""
    if config.path is not None:
        model = load_start(Path(config.path), rank, size, config.attn_implementation, config.config, task, seed)
    else:
        assert config.config is not None, "config.load requires one of model.path and model.config"
        model = models.from_config(config.config, seed, config.attn_implementation, task)
    # A base that this run's adapters started from is quantized as before.
    if config.load_in_4bit and not (model.checkpoint and model.quantization):
        return quantize(model, vars(config), getattr(torch, config.param_dtype))
    return model
