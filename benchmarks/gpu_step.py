"""Overhead of a training step on a GPU: one rank of odc_mpi compared with plain torch, on the same minibatches.

    plain            `Plain`: all tensors stay on the GPU, without fetches and pushes
    host_windows     `odc-mpi train` on one rank, shards on the host
    device_windows   the same, shards on the GPU

All compute in `model.param_dtype`, sum gradients and optimize in fp32, on the GPU, with the same optimizer; with bf16
each keeps fp32 masters. One rank does not wait for other ranks: the overhead is moving units, and the runtime's own
work. With many ranks, less waiting may save more than this costs, which is not measured here.

Contenders alternate in rounds, as in `odc_mpi/bench/contenders.py`. A round ends when the GPU has finished.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from odc_mpi.bench.baselines.unsharded import UnshardedBaseline
from odc_mpi.bench.contenders import Contender, OdcContender, Round, agreement, check_comparable, run_rounds
from odc_mpi.comm.device.device import Device
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.loader import Loader
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.resolved_settings import with_device
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.settings import CommConfig, Config, DataConfig, ModelConfig, load
from odc_mpi.training.update import make_optimizer

PLAIN, HOST, DEVICE = "plain", "host_windows", "device_windows"
#: Device of the shards, by contender.
WINDOW_DEVICE = {HOST: "cpu", DEVICE: "cuda"}
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


def configuration(path: Path | None, own_data: Path, timeout_s: float) -> Config:
    """Return the configuration of all contenders.

    Args:
        path: Configuration file of `odc-mpi train`; None for `MODEL`.
        own_data: Path of the data set that is written for `MODEL`.
        timeout_s: Maximum seconds of a wait.

    Raises:
        UserError: As for `load`, or a setting is specific to odc_mpi.
    """
    if path is not None:
        return comparable(with_device(load(path), "cuda"))
    write_data(own_data)
    config = Config(
        model=ModelConfig(config=MODEL, param_dtype="bfloat16"),
        data=DataConfig(path=str(own_data), minibatch_sequences=4, max_tokens_per_microbatch=LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
    )
    return comparable(config)


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
    alone: World,
    config: Config,
    device: Device,
    names: Sequence[str],
    steps: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train with plain torch and with odc_mpi on one rank. Does not communicate.

    Args:
        alone: World of this rank only; close it afterward to free the remaining memory.
        config: Configuration from `comparable`.
        names: Contenders of odc_mpi: `HOST` and `DEVICE`.
        steps: Minibatches per round.
        repeats: Number of rounds.
        report: Called with a line about the next measurement.

    Returns:
        Entry `step` of the object of `gpu.py`.

    Raises:
        UserError: Settings, data and model do not match, memory is insufficient, or losses differ.
    """
    assert alone.size == 1
    torch.set_num_threads(config.run.threads or alone.cores_per_rank())
    contenders = _Contenders(alone, config, device, names, report)
    rounds = run_rounds(
        alone,
        contenders.by_name,
        steps,
        repeats,
        lambda line: report(f"steps, {line}"),
        lambda: device.record_event().synchronize(),
    )
    fields = contenders.describe()
    contenders.close()
    tolerance = TOLERANCE[config.model.param_dtype]
    apart = agreement(rounds, PLAIN, tolerance)
    return {
        "steps": steps,
        "param_dtype": config.model.param_dtype,
        **fields,
        **figures(rounds),
        "loss_deviation": {name: apart[name] for name in names},
        "tolerance": tolerance,
        "losses": [loss for done in rounds[PLAIN] for loss in done.losses],
    }


def figures(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Return times of a minibatch, speeds and overheads, without the first round, which warms up."""
    step_s = {name: [done.seconds / len(done.losses) for done in some[1:]] for name, some in rounds.items()}
    speeds = {name: [done.num_tokens / done.seconds for done in some[1:]] for name, some in rounds.items()}
    overheads = {
        name: [own / plain - 1 for own, plain in zip(times, step_s[PLAIN], strict=True)]
        for name, times in step_s.items()
        if name != PLAIN
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

    def __init__(self, config: Config, loader: Loader, device: torch.device) -> None:
        super().__init__(config, loader, device)
        self._masters: list[torch.Tensor] = []
        self._narrow: list[torch.Tensor] = []
        dtype = getattr(torch, config.model.param_dtype)
        if dtype.itemsize < 4:
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


class _Contenders:
    """All contenders, each with a separate model."""

    def __init__(
        self, alone: World, config: Config, device: Device, names: Sequence[str], report: Callable[[str], None]
    ) -> None:
        report(f"steps, building {PLAIN}")
        inputs = open_inputs(config, rank=0, size=1)
        self._inputs = inputs
        self.by_name: dict[str, Contender] = {PLAIN: Plain(config, inputs.sequence_loader, device.torch_device)}
        self._trainers: dict[str, Trainer] = {}
        self._reductions: dict[str, str] = {}
        for name in names:
            report(f"steps, building {name}")
            own: Any = WINDOW_DEVICE[name]
            placed = replace(config, comm=replace(config.comm, window_device=own))
            inputs, decision = open_inputs(placed, rank=0, size=1), decide(placed, alone)
            self._reductions[name] = decision.reduction.value
            self._trainers[name] = build_trainer(placed, alone, inputs, decision)
            self.by_name[name] = OdcContender(self._trainers[name], rank=0)

    def describe(self) -> dict[str, Any]:
        """Return the size of the model and the reduction of each contender."""
        shapes = next(iter(self._trainers.values())).model.parameter_shapes().values()
        return {"model_numel": sum(map(math.prod, shapes)), "reduction": self._reductions}

    def close(self) -> None:
        """Close all contenders."""
        for trainer in self._trainers.values():
            with trainer:
                trainer.model.close()
        self._inputs.close()
