"""Resolution of settings that depend on the machine or on another run: Hub models, earlier runs and auto.

Settings are resolved once, at the start, so config.yaml and checkpoints contain the actual directories and dtypes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from odc_mpi.api import choose_device
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.errors import UserError, warn
from odc_mpi.hub import resolve_model_path
from odc_mpi.models.load import find_checkpoint
from odc_mpi.runtime.world import World
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.settings import Config, LoraConfig, default_learning_rate


def resolve_settings(
    config: Config, world: World, check_stop: Callable[[], None] = lambda: None
) -> tuple[Config, dict[str, str]]:
    """Resolve the settings that depend on the machine or on another run, and download missing models. Collective.

    All ranks call `check_stop`, which may be collective and raise an error, for each model and every half second during
    a download. Returns the configuration and remarks to print at start-up, keyed by setting (`optim.lr` for the
    learning rate). Raises `AllRanksUserError` if a model is not found or if settings contradict the checkpoint in
    `model.path`.
    """
    notes = {}
    path_in_settings = config.model.path
    config = _resolve_paths(config, world, check_stop)
    path = config.model.path
    if path is not None:
        world.require_same(Path(path).name, "model.path")
        checkpoint = world.run_on_all(lambda: find_checkpoint(Path(path)) if world.rank == 0 else None)
        newest = world.gather_objects(str(checkpoint.directory) if checkpoint else None)[0]
        if newest is not None:
            config = replace(config, model=replace(config.model, path=newest))
            config = world.run_on_all(partial(_continue_run, config))
        if config.model.path != path_in_settings:
            notes["model.path"] = str(config.model.path)
    device: str = config.run.device
    if device == "auto":
        needs_cpu = config.run.exact and "run.device" in recipe_of(config).allowed_if_exact
        device, reason = ("cpu", "run.exact requires it") if needs_cpu else choose_device(world)
        notes["run.device"] = f" (auto: {reason})"
    for name, value in (("model.param_dtype", config.model.param_dtype), ("optim.lr", config.optim.learning_rate)):
        if value == "auto":
            notes[name] = " (auto)"
    config = with_device(config, device)
    if world.rank == 0 and config.run.device == "cpu" and config.model.param_dtype == "bfloat16" and _lacks_bfloat16():
        warn(
            "WARNING: model.param_dtype bfloat16: this processor has no instructions for it (avx512_bf16, amx_bf16), "
            "so training is several times slower than with float32"
        )
    return config, notes


def _lacks_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the processor is known to lack bfloat16 arithmetic. On ARM, the feature is called bf16."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return not words & {"avx512_bf16", "amx_bf16", "bf16"}


def with_device(config: Config, device: str) -> Config:
    """Replace auto in `run.device` with `device`, and resolve auto in `optim.learning_rate` and in section `model`."""
    if config.optim.learning_rate == "auto":
        config = replace(config, optim=replace(config.optim, learning_rate=default_learning_rate(config)))
    if config.run.device == "auto":
        config = replace(config, run=replace(config.run, device=cast(Any, device)))
    if config.model.param_dtype == "auto":
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if config.run.device == "cuda" else "float32"
        config = replace(config, model=replace(config.model, param_dtype=dtype))
    if config.model.gradient_checkpointing == "auto":
        is_on = config.run.device == "cuda" and config.lora.r is None
        config = replace(config, model=replace(config.model, gradient_checkpointing=is_on))
    return config


def _resolve_paths(config: Config, world: World, check_stop: Callable[[], None]) -> Config:
    def gather(value: Any) -> list[Any]:
        check_stop()
        return world.gather_objects(value)

    report = {"report": partial(print, flush=True)} if world.rank == 0 else {}

    def resolve(value: str | None, setting: str, *, weights: bool = True) -> str | None:
        options: dict[str, Any] = {"gather": gather, "downloads": world.local_rank == 0, "weights": weights, **report}
        return None if value is None else resolve_model_path(value, setting, **options)

    path = resolve(config.model.path, "model.path")
    config = replace(config, model=replace(config.model, path=path))
    return recipe_of(config).resolve_paths(config, resolve)


def _continue_run(config: Config) -> Config:
    """Return the configuration with the adapter settings of the checkpoint in `model.path`, if it has adapters."""
    path = cast(str, config.model.path)
    with Checkpoint(Path(path)) as checkpoint:
        metadata: Mapping[str, Any] = checkpoint.manifest.metadata
    if "adapter" not in metadata:
        if config.lora.r is not None:
            raise UserError(
                f"lora.r: model.path {path} is a checkpoint, and adapters need a base in a Hugging Face directory: "
                f"odc-mpi export {path} --out DIR, and set model.path to DIR"
            )
        return config
    if config.model.config:
        raise UserError(f"model.config: model.path {path} is a LoRA adapter, whose base cannot change: remove it")
    lora = LoraConfig(**metadata["config"]["lora"])
    if config.lora.r is not None and config.lora != lora:
        name = next(name for name, value in vars(lora).items() if getattr(config.lora, name) != value)
        raise UserError(
            f"lora.{name}: expected {getattr(lora, name)}, as in model.path {path}, got {getattr(config.lora, name)}: "
            "change it, or remove all of lora"
        )
    return replace(config, lora=lora)
