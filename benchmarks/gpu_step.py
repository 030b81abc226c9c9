"""Overhead of a training step on a GPU: one rank of odc_mpi compared with plain torch, on the same minibatches.

    plain            `Plain`: all tensors stay on the GPU, without fetches and pushes
    host_windows     `odc-mpi train` on one rank, shards on the host
    device_windows   the same, shards on the GPU, used in place
    device_copies    the same, but each unit is copied before it is used, and gradients before they are added

All compute in `model.param_dtype`, sum gradients and optimize in fp32, on the GPU, with the same optimizer; with bf16
each keeps fp32 masters. One rank does not wait for other ranks: the overhead is moving units, and the runtime's own
work. With many ranks, less waiting may save more than this costs, which is not measured here.

Contenders alternate in rounds, as in `train_speed.py`. A round ends when the GPU has finished. Before the
rounds each trains on a minibatch; one that fails then is left out.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import UnshardedBaseline
from gpu_memory import Memory
from torch import nn
from train_speed import Contender, Round, agreement, check_comparable, deviation, odc_step, run_rounds

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.settings import CommConfig
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.loader import Loader
from odc_mpi.errors import AllRanksUserError, one_line_message
from odc_mpi.observe.usage import peak_flops
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs, training_flops
from odc_mpi.training.loop import Trainer
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.settings import Config, DataConfig, ModelConfig, load
from odc_mpi.training.start.resolved_settings import with_device
from odc_mpi.training.start.run_info import numel
from odc_mpi.training.update import make_optimizer

PLAIN, HOST, DEVICE, COPIES = "plain", "host_windows", "device_windows", "device_copies"
#: Settings of odc_mpi in the section `comm`, by contender.
COMM: Mapping[str, dict[str, Any]] = {
    HOST: {"window_device": "cpu"},
    DEVICE: {"window_device": "cuda"},
    COPIES: {"window_device": "cuda", "zero_copy": "off"},
}
#: Maximum relative difference of losses, by `model.param_dtype`: sums have another order, on a GPU also from one run to
#: the next (the backward of attention adds atomically), and differences accumulate over the steps.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}

#: Settings that all contenders share.
COMPARABLE = {"model.gradient_checkpointing": (False,), "model.reduce_dtype": ("float32",)}

#: Default configuration: a Qwen2 of 1.03 billion parameters, one sequence per microbatch.
LENGTH, VOCAB_SIZE = 4096, 32000
MODEL = {
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
SEQUENCES = 64


def configuration(path: Path | None, own_data: Path, timeout_s: float, layers: int | None = None) -> Config:
    """Return the configuration of all contenders.

    Args:
        path: Configuration file of `odc-mpi train`; None for `MODEL`, with this number of `layers` if given.
        own_data: Path of the data set that is written for `MODEL`.
        timeout_s: Maximum seconds of a wait.

    Raises:
        UserError: As for `load`, or a setting is specific to odc_mpi.
    """
    if path is not None:
        return comparable(with_device(load(path), "cuda"))
    write_data(own_data)
    model = MODEL | ({"num_hidden_layers": layers} if layers else {})
    config = Config(
        model=ModelConfig(config=model, param_dtype="bfloat16", gradient_checkpointing=False),
        data=DataConfig(path=str(own_data), minibatch_sequences=4, max_tokens_per_microbatch=LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
    )
    return comparable(with_device(config, "cuda"))


def comparable(config: Config) -> Config:
    """Return a configuration as all contenders run it: on the GPU, at a constant learning rate.

    Raises:
        UserError: A setting is specific to odc_mpi.
    """
    check_comparable(config, COMPARABLE, "benchmarks/gpu.py")
    return replace(
        config,
        data=replace(config.data, balance="lb_mini"),
        comm=replace(config.comm, window_device="cpu"),
        optim=replace(config.optim, device="cuda", lr_scheduler_type="constant", warmup_steps=0),
        run=replace(config.run, device="cuda"),
    )


def write_data(path: Path) -> None:
    """Write a data set of sequences of equal length, with tokens sampled by Zipf's law, so that a loss falls slowly."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, vocab_size=VOCAB_SIZE, tokenizer="none", source="Zipf's law") as writer:
        for _ in range(SEQUENCES):
            tokens = (rng.zipf(1.2, size=LENGTH) % VOCAB_SIZE).astype(np.uint32)
            writer.append(tokens, np.ones(LENGTH, dtype=bool))


def measure(
    self_world: World,
    config: Config,
    device: Device,
    names: Sequence[str],
    steps: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train with plain torch and with odc_mpi on one rank. Does not communicate.

    Args:
        self_world: World of this rank only; close it afterward to free the remaining memory.
        config: Configuration from `comparable`.
        names: Contenders of odc_mpi, keys of `COMM`.
        steps: Minibatches per round.
        repeats: Number of rounds.
        report: Called with a line about the next measurement.

    Returns:
        Entry `step` of the object of `gpu.py`.

    Raises:
        UserError: Settings, data and model do not match, or memory is insufficient for plain torch.
    """
    assert self_world.size == 1
    torch.set_num_threads(config.run.threads or self_world.cores_per_rank())
    contenders = Contenders(self_world, device, lambda line: report(f"steps, {line}"))
    contenders.add(PLAIN, lambda: contenders.plain(config))
    for name in names:
        contenders.add(name, partial(contenders.trainer, name, config, self_world, **COMM[name]))
    return run(contenders, config, steps, repeats)


def run(contenders: "Contenders", config: Config, steps: int, repeats: int) -> dict[str, Any]:
    """Measure and close contenders, and return their entry of the result. Collective.

    If losses differ, `left_out` has the entry `agreement`. Raises `AllRanksUserError` if the reference failed.
    """
    reference = contenders.reference
    rounds = contenders.run(steps, repeats)
    fields = contenders.figures(rounds)
    contenders.close()
    tolerance = TOLERANCE[config.model.param_dtype]
    try:
        agreement(rounds, reference, tolerance)
    except AllRanksUserError as error:
        fields["left_out"]["agreement"] = f"failed: {error}"
    return {
        "steps": steps,
        "param_dtype": config.model.param_dtype,
        **fields,
        "loss_deviation": {
            name: deviation(some, rounds[reference]) for name, some in rounds.items() if name != reference
        },
        "tolerance": tolerance,
        "losses": [loss for done in rounds[reference] for loss in done.losses],
    }


def failed(result: Mapping[str, Any]) -> bool:
    """Return True if a part of a result, or a contender in a part, is missing because of an error."""
    entries = [result, *(entry for entry in result.values() if isinstance(entry, dict))]
    reasons = [reason for entry in entries for reason in entry.get("left_out", {}).values()]
    return any(reason.startswith("failed") for reason in reasons)


def figures(rounds: Mapping[str, Sequence[Round]], reference: str = PLAIN) -> dict[str, Any]:
    """Return times of a minibatch, speeds and overheads, without the first round, which warms up."""
    step_s = {name: [done.seconds / len(done.losses) for done in some[1:]] for name, some in rounds.items()}
    speeds = {name: [done.num_tokens / done.seconds for done in some[1:]] for name, some in rounds.items()}
    overheads = {
        name: [seconds / plain - 1 for seconds, plain in zip(times, step_s[reference], strict=True)]
        for name, times in step_s.items()
        if name != reference
    }
    return {
        "seconds": {name: quartiles(times) for name, times in step_s.items()},
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "overhead": {name: quartiles(values) for name, values in overheads.items()},
    }


class Plain(UnshardedBaseline):
    """Plain torch that rounds where odc_mpi rounds, and keeps 18 bytes per parameter with AdamW in bf16.

    With `model.param_dtype: bfloat16` both compute in bf16, sum gradients in fp32 and optimize fp32 masters.
    """

    def __init__(self, config: Config, loader: Loader, device: torch.device, module: nn.Module | None = None) -> None:
        super().__init__(config, loader, device, module)
        self._masters: list[torch.Tensor] = []
        self._narrow: list[torch.Tensor] = []
        dtype = getattr(torch, config.model.param_dtype)
        if dtype.itemsize < 4 and config.lora.r is None:  # adapters are in fp32 themselves
            named_parameters = self._keep_masters(dtype)
            self._optimizer = make_optimizer(
                config.optim, named_parameters, {name: tuple(p.shape) for name, p in named_parameters}
            )
            self._optimizer.register_step_post_hook(self._cast)

    @torch.no_grad()
    def _cast(self, *_: object) -> None:
        torch._foreach_copy_(self._narrow, self._masters)

    def _keep_masters(self, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
        """Convert the model to a narrower type; return fp32 masters, to which each backward adds its gradients."""
        named = []
        for name, parameter in self._model.named_parameters():
            values, parameter.data = parameter.data, parameter.data.to(dtype)
            if parameter.requires_grad:
                master = nn.Parameter(values)
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))
                named.append((name, master))
                self._narrow.append(parameter)
                self._masters.append(master)
        return named


def _add_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)


class Contenders:
    """Contenders that could be built and trained on a minibatch, each with a separate model.

    Args:
        world: Ranks that measure; a contender that fails on one of them is left out on all.
        report: Called with a line about the next measurement.
        reference: Contender that the others are compared with.

    Attributes:
        by_name: Contenders by name.
        left_out: Reasons for missing contenders.
        reductions: How gradients reach their owners, by contender of odc_mpi.
        memory: Memory of each contender.
        model_numel: Number of elements of the model's parameters.
        flops_per_token: FLOPs of a training step per token, a mean over the data set.
    """

    def __init__(self, world: World, device: Device, report: Callable[[str], None], reference: str = PLAIN) -> None:
        self._world, self._device, self._report, self.reference = world, device, report, reference
        self.by_name: dict[str, Contender] = {}
        self.left_out: dict[str, str] = {}
        self.reductions: dict[str, str] = {}
        self.memory = Memory(device)
        self.model_numel, self.flops_per_token = 0, 0.0
        self._closing = ExitStack()

    def add(self, name: str, build: Callable[[], Contender]) -> None:
        """Build a contender and train it on a minibatch, or leave it out if it fails. Collective."""
        self._report(f"building {name}")
        error = None
        try:
            with self.memory.attribute_to(name):
                contender = build()
                contender()
            self.by_name[name] = partial(self._measured, name, contender)
        except Exception as raised:  # whatever it is, the others are measured
            error = f"failed: {type(raised).__name__}: {one_line_message(raised)}"
        errors = [each for each in self._world.gather_objects(error) if each]
        if errors:
            self.by_name.pop(name, None)
            self.left_out[name] = errors[0]

    def _measured(self, name: str, contender: Contender) -> tuple[float, int]:
        with self.memory.attribute_to(name):
            return contender()

    def plain(self, config: Config) -> Contender:
        """Build plain torch, which trains on this rank's share of the minibatches."""
        inputs = open_inputs(config, self._world.rank, self._world.size)
        self._closing.callback(inputs.close)
        return Plain(config, inputs.sequence_loader, self._device.torch_device).step

    def trainer(self, name: str, config: Config, world: World, **comm: Any) -> Contender:
        """Build a contender with the trainer of `build_trainer`. Collective in `world`."""
        # Without ranks to add to, each reports the loss of its share.
        trainer = self.build_trainer(name, config, world, **comm)
        return partial(odc_step, trainer, self._world.rank if world.size > 1 else 0)

    def build_trainer(self, name: str, config: Config, world: World, **comm: Any) -> Trainer:
        """Build the trainer of `odc-mpi train` on the ranks of `world`. Collective in `world`.

        It trains on this rank's share among all ranks, of which `world` may have this one only. `comm` are settings.
        """
        config = replace(config, comm=replace(config.comm, **comm))
        inputs, decision = open_inputs(config, self._world.rank, self._world.size), decide(config, world)
        self.reductions[name] = decision.reduction.value
        trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decision))
        self._closing.enter_context(trainer)
        self._closing.callback(trainer.model.close)
        self.model_numel = numel(trainer.model)
        lengths = inputs.dataset.lengths
        flops = training_flops(inputs.model, numel(trainer.model, True) / self.model_numel)
        self.flops_per_token = float(flops.sequence(lengths).sum() / lengths.sum())
        return trainer

    def run(self, steps: int, repeats: int) -> dict[str, list[Round]]:
        """Train in turns, and return the rounds of each contender; see `run_rounds`. Collective."""
        if self.reference in self.left_out:
            raise AllRanksUserError(f"{self.reference}: {self.left_out[self.reference]}")

        def finish() -> None:
            self._device.record_event().synchronize()

        return run_rounds(self._world, self.by_name, steps, repeats, self._report, finish)

    def figures(self, rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
        """Return sizes, times, speeds, utilization of the GPU, and peak memory, a sum over the ranks. Collective."""
        found = figures(rounds, self.reference)
        peak = peak_flops(self._device.name)
        peaks = self._world.gather_objects(self.memory.peaks)
        return {
            "model_numel": self.model_numel,
            "reduction": self.reductions,
            **found,
            "mfu": {
                name: peak and self.flops_per_token * speed / peak for name, speed in found["tokens_per_s"].items()
            },
            "peak_bytes": {name: sum(peak[name] for peak in peaks) for name in self.by_name},
            "left_out": self.left_out,
        }

    def close(self) -> None:
        """Free the memory of all contenders. Collective."""
        self.by_name.clear()
        self._closing.close()
