"""`run.exact`: what a run takes to give the same result to the last bit on any number of ranks, and what breaks it.

docs/exact.md has the argument. Gradients are added up as integers (`shard.elements.fixed_point`), minibatches are cut
by their sequences alone (`data.plan.same_cut`), and floating-point numbers of which a sum is reported are rounded so
that their order does not matter (`observe.participant.summable`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.deterministic

from odc_mpi.checkpoint.digest import blocks, digest_of
from odc_mpi.checkpoint.manifest import TensorRecord
from odc_mpi.checkpoint.shard_file import stored_type
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.errors import UserError
from odc_mpi.observe.metrics import Entry
from odc_mpi.observe.participant import Participant, Step
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.shard.elements.fixed_point import FixedPoint
from odc_mpi.train.settings import Config


def reduce_dtype(config: Config) -> torch.dtype:
    """Return the type in which gradients of a run are pushed and added up. Local."""
    return {"float32": torch.float32, "float64": torch.float64, "fixed64": torch.int64}[config.model.reduce_dtype]


def settled(config: Config) -> Config:
    """Return a configuration with all that `run.exact` takes; as it is without that. Local.

    Raises:
        UserError: A setting breaks it; names the setting.
    """
    if not config.run.exact:
        return config
    for setting, given, broken, instead in (
        ("model.reduce_dtype", config.model.reduce_dtype, "float64", "fixed64"),
        ("comm.transport", config.comm.transport, "collective", "window"),
        ("data.balance", config.data.balance, "lb_micro", "lb_mini or dynamic"),
        ("data.context_parallel", config.data.context_parallel, "auto", "off"),
        ("optim.fused", config.optim.fused, "off", "auto"),
        ("model.compile", str(config.model.compile).lower(), "true", "false"),
    ):
        if given == broken:
            raise UserError(f"{setting}: expected {instead} with run.exact, got {given}: {_REASONS[setting]}")
    return replace(
        config,
        model=replace(config.model, reduce_dtype="fixed64"),
        # torch's other implementations divide elements among threads at places that depend on the cut of a shard.
        optim=replace(config.optim, fused="on"),
        run=replace(config.run, threads=config.run.threads or 1),
    )


_REASONS = {
    "model.reduce_dtype": "floating-point sums depend on their order",
    "comm.transport": "its ranks run the same number of microbatches, cut for the number of ranks",
    "data.balance": "it cuts microbatches for the number of ranks",
    "model.compile": "kernels for one number of tokens, which each rank makes first, may round in another way",
    "data.context_parallel": "it cuts sequences for the number of ranks",
    "optim.fused": "torch's other optimizers may round elements at the end of a shard in another way",
}


@contextmanager
def deterministic(config: Config) -> Iterator[None]:
    """Have torch choose deterministic algorithms in an exact run, and as before afterwards. Local."""
    if not config.run.exact:
        yield
        return
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    # Asked for by cuBLAS, which reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def parameters_digest(state: TrainingState, world: World) -> str:
    """Return the digest that `odc-mpi checkpoint digest` would give of a checkpoint of this state. Collective.

    All elements go to rank 0, a block at a time.

    Returns:
        64 hexadecimal digits, on every rank.
    """
    manifest, parts, what = state.describe(0, {}), state.parts(), "sending parameters to rank 0 for their digest"

    def read(name: str, record: TensorRecord) -> Iterator[npt.NDArray]:
        for rank, first, last in record.pieces:
            for start, stop in blocks(first, last):
                if rank == world.rank:
                    begin, own = parts[name]
                    block = own[start - begin : stop - begin]
                    if rank:
                        world.wait(world.comm.Isend(block.view(np.uint8), dest=0), what)
                    yield block
                elif not world.rank:
                    block = np.empty(stop - start, dtype=stored_type(record.dtype))
                    world.wait(world.comm.Irecv(block.view(np.uint8), source=rank), what)
                    yield block

    # The other ranks go through the tensors in the same order; only rank 0 knows all that every rank has whole.
    return world.gather_objects(digest_of(manifest, read))[0]


class Exponents(Participant):
    """Keeps the exponents of fixed-point gradients in checkpoints, and tells what rounding lost.

    Args:
        elements: Of the model.
    """

    summary: ClassVar = {"fixed64_relative_error": Entry("fixed64_relative_error", "last")}

    def __init__(self, elements: FixedPoint) -> None:
        self._elements = elements

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Report the error. Local."""
        step.metrics["fixed64_relative_error"] = self._elements.relative_error

    def state(self) -> dict[str, Any]:
        """Return the exponents of the next minibatch. Local."""
        return {"fixed64_exponents": list(self._elements.exponents.values())}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Continue with the exponents of a checkpoint, if it has any. Local.

        Raises:
            UserError: The checkpoint is of a model with other arrays.
        """
        exponents = about.get("fixed64_exponents")
        if exponents is None:
            return
        if len(exponents) != len(self._elements.exponents):
            raise UserError(
                f"expected fixed64_exponents of {len(self._elements.exponents)} arrays in the checkpoint, got "
                f"{len(exponents)}: set run.resume to never"
            )
        self._elements.exponents = dict(zip(self._elements.exponents, exponents, strict=True))
