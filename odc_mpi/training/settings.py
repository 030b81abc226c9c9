"""Settings of a training run: dataclasses with a help text for each field, and functions to read and write them.

`load` reads a YAML file and ``--section.key value`` arguments into a checked `Config`, and `dump` writes it as YAML.
Neither communicates: every rank reads the same file, so all ranks get the same `Config` or the same error.
"""

import functools
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from odc_mpi import yaml_dialect as dialect
from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.models.configuration import unsupported_reason
from odc_mpi.observe.trackers import TRACKERS
from odc_mpi.setting_types import (
    NAMES,
    NON_EMPTY_NAMES,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    POSITIVE,
    Check,
    Setting,
    format_value,
    settings_of,
    type_signature,
)
from odc_mpi.training.islands.settings import ISLAND_CONFLICTS, IslandsConfig, check_islands
from odc_mpi.training.parsing.aliases import ALIASES
from odc_mpi.training.parsing.conflicts import Allowed, Conflicts, check_conflicts, check_evaluation
from odc_mpi.training.parsing.read import COMMAND_LINE, Reader
from odc_mpi.training.recipes import DEFAULT, RECIPES, ObjectiveName, Recipe, recipe_of, select_recipe
from odc_mpi.training.recipes.dpo import DPOConfig
from odc_mpi.training.recipes.kto import KTOConfig
from odc_mpi.training.recipes.reward import RewardConfig
from odc_mpi.training.recipes.rollouts.settings import WEIGHT_CONFLICTS, RLConfig

#: Width of the help text, and indentation of the descriptions.
_WIDTH, _INDENT = 100, 34
#: Suffixes of files that `odc-mpi prepare` reads.
_TEXT = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
#: Functions that explain why a setting's value is invalid. The explanation is appended to the error.
_REASONS = {
    "model.attn_implementation": unsupported_reason,
    "optim.lr_scheduler_type": lambda value: " (cosine with optim.min_lr_ratio)" if "min_lr" in str(value) else "",
    "optim.warmup_steps": lambda value: " (optim.warmup_ratio takes a fraction)" if isinstance(value, float) else "",
}

#: Settings of which exact runs support only some values.
_ALLOWED_IF_EXACT: Allowed = {
    "data.balance": (("lb_mini", "dynamic", "local_sort"), "its microbatches depend on the number of ranks"),
    "data.context_parallel": (("off",), "its chunks depend on the number of ranks"),
    "islands.quorum": ((0,), "which islands are late depends on the machine"),
    "islands.wire": (("float32", "bfloat16", "int8", "e3m0"), "its blocks depend on the number of ranks"),
    "model.compile": ((False,), "kernels that are compiled for one number of tokens may round differently"),
}
_CONTEXT_PARALLEL_CONFLICTS = Conflicts(
    "data.context_parallel",
    lambda value: value != "off",
    {
        "data.balance": (("dynamic",), "ranks that hold chunks of a sequence have less time for other microbatches"),
        "model.compile": ((False,), "the attention of chunks reads keys and values from other ranks"),
    },
)
QUANTIZATION_CONFLICTS = Conflicts(
    "model.load_in_4bit", bool, {"model.compile": ((False,), "weights are dequantized outside of compiled kernels")}
)
_PREFIX_CONFLICTS = Conflicts(
    "model.cache_frozen_prefix",
    bool,
    {
        "data.context_parallel": (("off",), "what is stored is computed for unsplit sequences"),
        "model.compile": ((False,), "compiled layers cannot be left out"),
        "islands.by": (("off",), "islands do not share what they store"),
    },
)

_MEMORY_CONFLICTS = Conflicts(
    "run.memory_every", bool, {"islands.mode": (("hybrid",), "islands that train apart are saved together, on disk")}
)

_FRACTION = Check("0 or more and below 1", lambda value: 0 <= value < 1)
_SHARE = Check("above 0 and at most 1", lambda value: 0 < value <= 1)
_RATE = Check("0 or more", lambda value: value == "auto" or value >= 0)
_SEED = Check("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)
_TOKENS = Check("from 1 to 2**31 - 1", lambda value: 1 <= value < 2**31)
_THREADS = Check("from 0 to 1024", lambda value: 0 <= value <= 1024)
_TRACKERS = Check(f"each one of {', '.join(TRACKERS)}", lambda value: all(name in TRACKERS for name in value))
_NOT_EMPTY = Check("not empty", lambda value: value not in ("", []))


@dataclass(frozen=True)
class ModelConfig:
    """Settings for the model, and for the types in which parameters are stored and gradients are summed."""

    path: Annotated[str | None, "Hugging Face directory, OWNER/NAME[@REVISION] on the Hub, or a run", _NOT_EMPTY] = None
    config: Annotated[dict[str, Any] | None, "transformers settings: over model.path, or of a new model"] = None
    param_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "type of stored and fetched parameters; auto: bfloat16 on GPUs"
    ] = "auto"
    reduce_dtype: Annotated[
        Literal["float32", "fixed64"], "type of gradient sums; fixed64: fixed point, order-independent"
    ] = "float32"
    attn_implementation: Annotated[Literal["sdpa", "eager"], "attention; with soft caps always eager"] = "sdpa"
    gradient_checkpointing: Annotated[
        Literal["auto"] | bool, "recompute activations in the backward pass; auto: on GPUs, without adapters"
    ] = "auto"
    compile: Annotated[bool, "compile each layer with torch.compile; docs/gpu.md"] = False
    load_in_4bit: Annotated[bool, "with lora.r: quantize the frozen linear layers with bitsandbytes; docs/lora.md"] = (
        False
    )
    cache_frozen_prefix: Annotated[
        bool, "with lora.r: compute the frozen layers before the first trained one once; docs/lora.md"
    ] = False
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], "load_in_4bit: code of the weights"] = "nf4"
    bnb_4bit_use_double_quant: Annotated[bool, "load_in_4bit: quantize the scales of the weights, too"] = True


@dataclass(frozen=True)
class DataConfig:
    """Settings for the data, and for how a minibatch is packed into microbatches and assigned to ranks."""

    path: Annotated[str, "data set of odc-mpi prepare; grpo, distill: prompts as JSONL or Parquet", _NOT_EMPTY]
    balance: Annotated[
        Literal["local_sort", "lb_micro", "lb_mini", "dynamic"], "assignment of sequences to ranks; docs/scheduling.md"
    ] = "lb_mini"
    context_parallel: Annotated[Literal["auto", "off"], "split the longest sequences; needs balance dynamic"] = "off"
    cost: Annotated[Literal["linear", "flops", "fitted"], "cost of a sequence; fitted: from measured times"] = "flops"
    minibatch_sequences: Annotated[int, "sequences (pairs, completions) per step on all ranks", ONE_OR_MORE] = 16
    max_tokens_per_microbatch: Annotated[int, "most tokens of one forward and backward on one rank", _TOKENS] = 4096
    eval_path: Annotated[str | None, "held-out data set, of the same kind as data.path", _NOT_EMPTY] = None
    eval_sequences: Annotated[int, "evaluate on the first N sequences; 0: all", NOT_NEGATIVE] = 0


@dataclass(frozen=True)
class LoraConfig:
    """Settings for LoRA adapters, which peft adds. With adapters, the parameters of the model itself are frozen."""

    r: Annotated[int | None, "rank of the adapters; null: no adapters, train the full model", ONE_OR_MORE] = None
    alpha: Annotated[int, "scale of the adapters: alpha / r", ONE_OR_MORE] = 8
    dropout: Annotated[float, "dropout of the inputs of adapters", _FRACTION] = 0.0
    target_modules: Annotated[list[str] | Literal["all-linear"], "linear layer names", NAMES] = "all-linear"
    target_parameters: Annotated[list[str] | None, "other parameters, such as fused experts", NON_EMPTY_NAMES] = None
    layers_to_transform: Annotated[list[int] | None, "layers that get adapters, from 0; null: all", _NOT_EMPTY] = None
    modules_to_save: Annotated[list[str] | None, "modules to train in full, such as lm_head", NON_EMPTY_NAMES] = None


@dataclass(frozen=True)
class OptimConfig:
    """Settings for the optimizer, the learning rate and gradient clipping."""

    optimizer: Annotated[Literal["adamw", "sgd"], "optimizer"] = "adamw"
    learning_rate: Annotated[
        Literal["auto"] | float,
        "peak; auto: 2e-5, adapters, new model 1e-4; dpo, kto, grpo, distill 1e-6; reward 1e-4",
        _RATE,
    ] = "auto"
    weight_decay: Annotated[float, "weight decay", NOT_NEGATIVE] = 0.0
    adam_beta1: Annotated[float, "adamw: decay of the first moment", _FRACTION] = 0.9
    adam_beta2: Annotated[float, "adamw: decay of the second moment", _FRACTION] = 0.999
    adam_epsilon: Annotated[float, "adamw: added to the denominator", POSITIVE] = 1e-8
    momentum: Annotated[float, "sgd: momentum", _FRACTION] = 0.0
    max_grad_norm: Annotated[float, "clip gradients to this global norm; 0: no clipping", NOT_NEGATIVE] = 1.0
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant", "warmup_stable_decay"], "decay after the warm-up"
    ] = "linear"
    min_lr_ratio: Annotated[float, "learning rate at the end of the decay, as a fraction of the peak", _FRACTION] = 0.0
    decay_ratio: Annotated[float, "warmup_stable_decay: fraction of the steps with decay", _SHARE] = 0.1
    warmup_steps: Annotated[int, "steps of linear warm-up", NOT_NEGATIVE] = 0
    warmup_ratio: Annotated[float, "instead of warmup_steps: fraction of the steps", _FRACTION] = 0.0
    device: Annotated[Literal["cpu", "cuda"], "device of optimizer and states; cuda needs GPU memory"] = "cpu"


@dataclass(frozen=True)
class RunConfig:
    """Settings for the objective, length, evaluation, device, files and checkpoints of a run."""

    objective: Annotated[ObjectiveName, "fine-tuning, preferences, a reward model, rewards, or a teacher"] = DEFAULT
    steps: Annotated[int, "optimizer steps, one per minibatch; 0: set by num_train_epochs", NOT_NEGATIVE] = 0
    num_train_epochs: Annotated[float | None, "passes over the data, instead of run.steps; null: 1", POSITIVE] = None
    eval_every: Annotated[int, "steps between evaluations; 0: only after the last step", NOT_NEGATIVE] = 0
    eval_on_start: Annotated[bool, "also evaluate before the first step"] = False
    dir: Annotated[str, "directory for all files of the run", _NOT_EMPTY] = "runs/run"
    log_dir: Annotated[str | None, "directory for a log file per rank: host, cores, warnings", _NOT_EMPTY] = None
    seed: Annotated[int, "seed of new weights and of the order of the data", _SEED] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], "device of the model; auto: cuda if each rank has a GPU"] = "auto"
    threads: Annotated[int, "torch threads per rank; 0: cores of the node divided by its ranks", _THREADS] = 0
    trace_steps: Annotated[int, "number of last steps to record in trace.json; 0: none", NOT_NEGATIVE] = 3
    max_skipped_steps: Annotated[int, "end after this many non-finite gradients in a row", ONE_OR_MORE] = 10
    detect_anomaly: Annotated[bool, "end at the first non-finite gradient, and write its data to anomaly.json"] = False
    checkpoint_every: Annotated[int, "steps between checkpoints; 0: only after the last step", NOT_NEGATIVE] = 0
    memory_every: Annotated[
        int | None, "steps between copies of the state in memory; null: none; docs/checkpoints.md", ONE_OR_MORE
    ] = None
    memory_dir: Annotated[str, "directory of each node for these copies; %h: name of the host", _NOT_EMPTY] = "/dev/shm"
    keep_checkpoints: Annotated[int, "number of newest checkpoints to keep; 0: all", NOT_NEGATIVE] = 0
    norm_watch: Annotated[
        float, "warn of ranks with gradients above N times their usual ones; 0: off", NOT_NEGATIVE
    ] = 1000.0
    keep_best: Annotated[bool, "also keep the checkpoint with the lowest eval loss, or the highest reward"] = False
    resume: Annotated[str, "auto: newest checkpoint of run.dir; never; or a checkpoint", _NOT_EMPTY] = "auto"
    exact: Annotated[bool, "bitwise identical results on any number of ranks; docs/exact.md"] = False
    report_to: Annotated[list[str] | None, "experiment trackers; docs/watching.md", _TRACKERS] = None


@dataclass(frozen=True)
class Config:
    """All settings of a run, by section. `load` checks the values; the constructor does not."""

    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration from an optional YAML file and command-line arguments, which override it.

    The arguments have the form ``--section.key value`` or ``--section.key=value``. Names in `training.parsing.aliases`
    are also accepted. ``--model.config.hidden_size 128`` sets one key of the dictionary `model.config`. Raises a
    `UserError` that names the source and the setting if a setting is unknown, invalid or missing.
    """
    return _build(_read_values(path, overrides)[0], str(path) if path else COMMAND_LINE)


def load_mapping(document: dict[str, Any], source: str) -> Config:
    """Convert parsed YAML to a checked configuration. If it is invalid, raises a `UserError` that names `source`."""
    return _build(Reader(all_settings()).read(document, source)[0], source)


def _read_values(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    document = dialect.read_file(path) if path else None
    return Reader(all_settings()).read(document, str(path), overrides)


def _build(values: dict[str, Any], source: str) -> Config:
    _check_together(values, source)
    sections: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return Config(**{name: kind(**sections[name]) for name, kind in _sections().items()})


def dump(config: Config) -> str:
    """Return all settings of a configuration as YAML, from which `load` reads an equal configuration."""
    return dialect.write(asdict(config))


def defaults() -> dict[str, Any]:
    """Return the default values, keyed by setting name. Settings without a default are omitted."""
    return {key: setting.default for key, setting in all_settings().items() if setting.default is not MISSING}


def help_text(section: str = "") -> str:
    """Return the text of ``odc-mpi train --help`` for all settings or for one section, at most 100 columns wide.

    The section `names` lists the accepted names from other libraries. Raises `UserError` if `section` does not exist.
    """
    sections = _sections()
    if section == "names":
        return _columns("Names of transformers, TRL, peft, axolotl and torchtitan that are accepted, too:", ALIASES)
    if section and section not in sections:
        raise UserError(f"--help: expected one of {', '.join([*sections, 'names'])}, got {section}")
    parts = []
    for name, kind in sections.items():
        if section in ("", name):
            rows = {key: _describe(each) for key, each in all_settings().items() if key.startswith(f"{name}.")}
            parts.append(_columns(f"{name}: {' '.join((kind.__doc__ or '').split())}", rows))
    return "\n\n".join(parts)


def _describe(setting: Setting) -> str:
    default = "required" if setting.default is MISSING else f"default: {format_value(setting.default)}"
    return f"{setting.help}\n({type_signature(setting.type)}; {default})".replace('"', "")


def _columns(title: str, rows: Mapping[str, str]) -> str:
    lines = textwrap.wrap(title, _WIDTH)
    for name, text in rows.items():
        width = _WIDTH - _INDENT
        wrapped = [line for part in text.split("\n") for line in textwrap.wrap(part, width, break_on_hyphens=False)]
        lines.append(f"  {name:<{_INDENT - 3}} {wrapped[0]}")
        lines += [" " * _INDENT + line for line in wrapped[1:]]
    return "\n".join(lines)


def describe(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return a line with each setting's value and source for ``odc-mpi config``. Raises the same errors as `load`."""
    values, sources = _read_values(path, overrides)
    config = _build(values, str(path))
    rows = []
    for name in all_settings():
        section, _, key = name.partition(".")
        value, source = getattr(getattr(config, section), key), sources.get(name, "default")
        if name == "optim.learning_rate" and value == "auto":
            value, source = default_learning_rate(config), f"auto ({source})"
        rows.append((name, format_value(value).strip('"'), source))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]


def default_learning_rate(config: Config) -> float:
    """Return the learning rate for auto: TRL's default, or more for adapters or, in fine-tuning, for a new model."""
    return recipe_of(config).learning_rate(
        from_scratch=config.model.path is None, has_adapters=config.lora.r is not None
    )


def _sections() -> dict[str, Any]:
    return get_type_hints(Config)


@functools.cache
def all_settings() -> dict[str, Setting]:
    """Return all settings, keyed by names such as `run.steps`, in the order of the help text."""
    settings = {}
    for section_name, section in _sections().items():
        for field_name, setting in settings_of(section).items():
            name = f"{section_name}.{field_name}"
            settings[name] = setting._replace(explain=_REASONS.get(name))
    return settings


def _require_dataset(source: str, key: str, values: dict[str, Any]) -> None:
    """Raise `UserError` if `key` is the path of a text file. The message has the command that converts it."""
    path = Path(values.get(key) or "")
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    recipe = RECIPES[values.get("run.objective", DEFAULT)]
    if recipe.data != "prompts" and Path(name).suffix in _TEXT:
        out = shlex.quote(str(path.with_name(name).with_suffix(".h5")))
        model = values.get("model.path")
        tokenizer = f" --tokenizer {shlex.quote(model)}" if model else ""
        raise UserError(
            f"{source}: {key}: expected a data set of odc-mpi prepare, got text: run odc-mpi prepare "
            f"{shlex.quote(str(path))} --out {out}{tokenizer}, and set {key} to {out}"
        )


def _conflicts(recipe: Recipe) -> list[Conflicts]:
    """Return all combinations of settings that a run with this recipe does not support."""
    exact = Conflicts("run.exact", bool, {**_ALLOWED_IF_EXACT, **recipe.allowed_if_exact})
    others = (_CONTEXT_PARALLEL_CONFLICTS, QUANTIZATION_CONFLICTS, _PREFIX_CONFLICTS, _MEMORY_CONFLICTS)
    return [recipe.conflicts, ISLAND_CONFLICTS, exact, *others, *WEIGHT_CONFLICTS]


def _check_together(values: dict[str, Any], source: str) -> None:
    for key, setting in all_settings().items():
        if setting.default is MISSING and key not in values:
            raise UserError(f"{source}: {key} is missing: expected {setting.help}; give it with --{key}")
    path, entries = values.get("model.path"), values.get("model.config")
    if path is None and entries is None:
        raise UserError(f"{source}: expected model.path or model.config, got neither")
    if path is not None and entries and "model_type" in entries:
        raise UserError(f"{source}: model.config.model_type: the type is that of model.path: remove one of the two")
    if path is None and not isinstance((entries or {}).get("model_type"), str):
        raise UserError(f"{source}: model.config: model_type is missing: set it, as in --model.config.model_type qwen2")
    for key in ("data.path", "data.eval_path"):
        _require_dataset(source, key, values)
    check_evaluation(values, source)
    recipe = select_recipe(values, source)
    check_conflicts(_conflicts(recipe), defaults() | values, source)
    recipe.check(values, source)
    check_islands(values, source)
    in_memory, on_disk = (values.get(f"run.{name}_every") or 0 for name in ("memory", "checkpoint"))
    if on_disk and in_memory >= on_disk:
        raise UserError(
            f"{source}: run.memory_every: expected less than run.checkpoint_every, {on_disk}, got {in_memory}: copies "
            "in memory are for the steps between checkpoints"
        )
    if values.get("lora.r") is None:
        for key, frozen in (("model.load_in_4bit", "4-bit weights"), ("model.cache_frozen_prefix", "these layers")):
            if values.get(key):
                raise UserError(
                    f"{source}: {key} requires lora.r, because {frozen} are frozen: set lora.r, the rank of the "
                    f"adapters that train, or remove {key}"
                )
        present = [key for key in values if key.startswith("lora.") and key != "lora.r"]
        if any(values[key] != all_settings()[key].default for key in present):
            raise UserError(f"{source}: {present[0]} requires lora.r: set lora.r, the rank of the adapters")
