"""Models that train a little and are saved, and loaded, on N ranks in the threads of this process."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from toy_models import VOCABULARY, Transformer

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.state import CheckpointWeights, TrainingState, require_model, restore_buffers
from odc_mpi.shard.model import ShardedModel


class Normed(Transformer):
    """With buffers that are saved, one of integers, and one that is not; and with a parameter without dimensions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.statistics = nn.BatchNorm1d(VOCABULARY, affine=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("allowed", torch.tensor([True, False]))

    def forward(self, tokens):
        return self.statistics(super().forward(tokens).flatten(0, 1).float()) * self.scale


def build(tied=True, frozen=True, seed=0, idle=False):
    torch.manual_seed(seed)
    module = Normed(tied=tied)
    if frozen:
        module.blocks[0].requires_grad_(False)
        module.norm.requires_grad_(False)
    if idle:
        module.idle = nn.Parameter(torch.randn(3, 5))  # no forward uses it
    return module


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(model, optimizer, steps=2):
    torch.manual_seed(7)
    for _ in range(steps):
        with model.minibatch():
            model(torch.randint(VOCABULARY, (2, 5))).square().mean().backward()
        optimizer.step()
        model.publish()


def full_state(model, optimizer):
    """This rank's part of everything that a checkpoint should hold: `{name: (start, values)}`, copied."""
    slices = {interval.spec.name: (interval.start, tensor.clone()) for interval, tensor in model.slices()}
    found = {f"model/{name}": part for name, part in slices.items()}
    for name, parameter in model.named_shard_parameters():
        for key, value in optimizer.state[parameter].items():
            if value is not None:
                found[f"optimizer/{key}/{name}"] = (slices[name][0] if value.dim() else 0, value.clone())
    return found


def full_buffers(model):
    return {name: value.clone() for name, value in model.module.named_buffers() if name != "scratch"}


def whole(parts):
    """Concatenate the parts of all ranks. A rank has no optimizer state of parameters that others own."""
    paths = dict.fromkeys(path for part in parts for path in part)
    ordered = {
        path: sorted((part[path] for part in parts if path in part), key=lambda interval: interval[0]) for path in paths
    }
    return {
        path: torch.cat([values for _, values in intervals]) if intervals[0][1].dim() else intervals[0][1]
        for path, intervals in ordered.items()
    }


def write(directory, transport, size, model, optimizer, step, metadata, warn=pytest.fail):
    state = TrainingState(model, optimizer, transport.group.rank)
    saver = Saver(directory, transport.group.rank, size, "token", warn=warn)
    records = transport.gather(state.state_records())
    manifest = state.make_manifest(step, metadata, records) if transport.group.rank == 0 else None
    saver.start(step, state.snapshot(), manifest)
    saver.wait_until_written()
    saver.receive_reports(transport.complete_gradients(np.array(saver.report())))
    saver.wait_until_published()


def save(
    directory, size, step=2, param_dtype=torch.float32, make=make_adamw, metadata=None, make_module=build, **options
):
    """Train and save on some ranks; return the full state, and the module's buffers."""
    warnings = []

    def work(transport):
        model = ShardedModel(make_module(**options), transport)
        optimizer = make(model.shard_parameters())
        train(model, optimizer)
        write(directory, transport, size, model, optimizer, step, metadata or {}, warnings.append)
        return full_state(model, optimizer), full_buffers(model)

    parts = run_ranks(size, work, param_dtype, torch.float32)
    return whole([part for part, _ in parts]), parts[0][1], warnings


def load(directory, size, param_dtype=torch.float32, make=make_adamw, steps=0, out=None, **options):
    """Load on some ranks, continue, and save there if asked; return the full state and the buffers."""

    def work(transport):
        module = build(seed=99, **options)
        with Checkpoint(directory) as checkpoint:
            require_model(checkpoint, module)
            restore_buffers(module, checkpoint)
            model = ShardedModel(module, transport, weights=CheckpointWeights(checkpoint))
            optimizer = make(model.shard_parameters())
            TrainingState(model, optimizer, transport.group.rank).restore(checkpoint)
        if steps:
            train(model, optimizer, steps)
        if out is not None:
            write(out, transport, size, model, optimizer, 2, {})
        return full_state(model, optimizer), full_buffers(model)

    parts = run_ranks(size, work, param_dtype, torch.float32)
    return whole([part for part, _ in parts]), parts[0][1]


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for path, value in wanted.items():
        assert actual[path].dtype == value.dtype, path
        assert torch.equal(actual[path], value), path
