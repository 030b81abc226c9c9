"""Compare writing and reading checkpoints with plain files of the same size and torch.distributed.checkpoint (dcp).

    mpiexec -n 2 python benchmarks/checkpoint.py [--size 1G] [--dir DISK] [--repeats 5]

Every rank owns a part of a stack of matrices and of their AdamW state. All ranks run the same variant at the same time,
the variants alternate in rounds, and the time is that of the slowest rank.

    write   plain: one file per rank in blocks, synced to the disk
            odc_mpi: the copy, the files of the ranks with checksums, index, manifest, name; synced
            dcp: torch.distributed.checkpoint, synced
            files of the round before are removed first, untimed: the time for that varies between disks
    read    the same files, back into the memory of the model, with checksums where available; the node's page cache of
            the files is dropped before, if the system permits
    pause   the part of the writing time for which training waits: the copy, preparing the manifest, starting the thread

`measure` returns, and rank 0 prints as one line of JSON:

    benchmark      "checkpoint"
    library, ranks, nodes, repeats, state_bytes
    load_average   [before, after], the node's over a minute
    left_out       {variant: reason}
    variants       {write_plain, write_odc_mpi, write_dcp, read_plain, read_odc_mpi, read_dcp, pause:
                    {seconds: {low, median, high}, gb_per_s}}, for the bytes of all ranks together
    goals          a list of {goal, figure, expected, reached}, medians over rounds of ratios within a round
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from baselines import gloo_process_group
from measure import header, interleaved, parse_sizes, ratio, slowest, slowest_s
from torch import nn

from odc_mpi.api import shard_model
from odc_mpi.checkpoint.manifest import step_name
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.state import CheckpointWeights, TrainingState
from odc_mpi.comm.settings import CommConfig
from odc_mpi.runtime.ranks import run_on_all_ranks
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles

#: 16 MiB per matrix: the mean of a model of 1.5 B parameters. Each costs the same time in the index, whatever its size.
_WIDTH = 2048
_BLOCK_BYTES = 4 << 20
#: Files of each variant in the directory.
_WRITTEN = {"plain": "plain_*", "odc_mpi": "step_*", "dcp": "dcp"}
#: A parameter in fp32 and two moments of AdamW.
_BYTES_PER_PARAMETER = 12
#: Goals: name, bound, expected value, and two variants, whose ratio of times in a round is the figure.
GOALS = (
    ("write_of_plain", ">=", 0.7, "write_plain", "write_odc_mpi"),
    ("read_of_plain", ">=", 0.7, "read_plain", "read_odc_mpi"),
    ("pause_of_write", "<=", 0.15, "pause", "write_odc_mpi"),
    ("write_of_dcp", ">=", 1.0, "write_dcp", "write_odc_mpi"),
    ("read_of_dcp", ">=", 1.0, "read_dcp", "read_odc_mpi"),
)


def main() -> int:
    """Measure, let rank 0 print the object, and return the exit code. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1G", help="size of the state of all ranks")
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--repeats", type=int, default=5, help="number of rounds")
    given = parser.parse_args()
    world = World(timeout_s=900.0)

    def work() -> None:
        result = measure(world, parse_sizes(given.size, "--size")[0], given.repeats, given.dir)
        if world.rank == 0:
            print(json.dumps(result), flush=True)

    return run_on_all_ranks(world, work)


class _Drawn:
    """Parameters of no model: numbers as random as trained ones."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `shard.local_shards.WeightSource`."""
        return torch.randn(stop - start)


class State:
    """A model and an optimizer of a given size, and their checkpoints on a disk. Construction is collective.

    Args:
        num_bytes: Size of parameters and optimizer state, over all ranks.
        directory: Directory to write to, visible to all ranks.
    """

    def __init__(self, world: World, num_bytes: int, directory: Path) -> None:
        layers = max(1, num_bytes // (_BYTES_PER_PARAMETER * _WIDTH * _WIDTH))
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self._world = world
        self._directory = directory
        self.model = shard_model(module, world, units=[nn.Linear], weights=_Drawn(), comm=CommConfig(prefetch=0))
        self.optimizer = torch.optim.AdamW(self.model.shard_parameters())
        for parameter in (each for each in self.model.shard_parameters() if each.numel()):
            moments = {key: torch.rand_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        self._state = TrainingState(self.model, self.optimizer, world.rank)
        self._plain = torch.cat([tensor.view(-1) for tensor in self._tensors().values()]).numpy()
        self.num_bytes = sum(world.gather_objects(self._plain.nbytes))
        self.pauses_s: list[float] = []
        self._round = 0

    def write_plain(self) -> None:
        """Write a file of the size of this rank's state."""
        with (self._directory / f"plain_{self._world.rank}").open("wb", buffering=0) as file:
            for block in self._blocks():
                file.write(block)
            os.fsync(file.fileno())

    def write_odc_mpi(self) -> None:
        """Save as a run does, and wait until the checkpoint is written. Collective."""
        world = self._world
        self._round += 1
        saver = Saver(self._directory, world.rank, world.size, f"{self._round}", warn=_fail)
        began = perf_counter()
        records = world.gather_objects(self._state.state_records())
        entries = self._state.snapshot()
        saver.start(1, entries, self._state.make_manifest(1, {}, records) if world.rank == 0 else None)
        self.pauses_s.append(perf_counter() - began)
        saver.wait_until_written()
        saver.receive_reports(np.array(world.gather_objects(saver.report())))
        saver.wait_until_published()

    def write_dcp(self) -> None:
        """Save with torch.distributed.checkpoint. Collective."""
        writer = dcp.FileSystemWriter(self._directory / "dcp", sync_files=True)
        dcp.save(self._tensors(), storage_writer=writer)

    def read_plain(self) -> None:
        """Read the file back."""
        with (self._directory / f"plain_{self._world.rank}").open("rb", buffering=0) as file:
            for block in self._blocks():
                file.readinto(block)

    @torch.no_grad()
    def read_odc_mpi(self) -> None:
        """Read this rank's slices, as a resumed run does."""
        with Checkpoint(self._directory / step_name(1)) as checkpoint:
            weights = CheckpointWeights(checkpoint)
            for tensor_slice, tensor in self.model.slices():
                tensor.copy_(weights.read(tensor_slice.spec.name, tensor_slice.start, tensor_slice.stop))
            self._state.restore(checkpoint)

    def read_dcp(self) -> None:
        """Read with torch.distributed.checkpoint. Collective."""
        dcp.load(self._tensors(), storage_reader=dcp.FileSystemReader(self._directory / "dcp"))

    def remove(self, name: str) -> None:
        """Remove the files of a variant, so that the disk has no pending work."""
        if self._world.rank == 0:
            for path in self._directory.glob(_WRITTEN[name]):
                path.unlink() if path.is_file() else shutil.rmtree(path)
            os.sync()

    def drop_page_cache(self) -> None:
        """Drop this node's page cache of the files."""
        for path in self._directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def _blocks(self) -> Iterator[memoryview]:
        content = memoryview(self._plain.view(np.uint8))  # type: ignore[arg-type]
        for start in range(0, len(content), _BLOCK_BYTES):
            yield content[start : start + _BLOCK_BYTES]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by names that no other rank has."""
        tensors = {f"{self._world.rank}/{part.spec.name}": tensor for part, tensor in self.model.slices()}
        for name, parameter in self.model.named_shard_parameters():
            for key in ("exp_avg", "exp_avg_sq") if parameter.numel() else ():
                tensors[f"{self._world.rank}/{key}/{name}"] = self.optimizer.state[parameter][key]
        return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def measure(world: World, num_bytes: int, repeats: int, place: Path) -> dict[str, Any]:
    """Write and read checkpoints with all variants. Collective.

    Args:
        num_bytes: Size of the state, over all ranks.
        repeats: Number of rounds.
        place: Directory on the disk to measure.

    Returns:
        The object that the module's docstring describes, the same on every rank.
    """
    before = os.getloadavg()[0]
    made = tempfile.mkdtemp(prefix=".odc_mpi-bench-", dir=place) if world.rank == 0 else ""
    directory = Path(world.gather_objects(made)[0])
    one_node = world.num_nodes == 1
    try:
        state = State(world, num_bytes, directory)
        names = ["plain", "odc_mpi", *(["dcp"] if one_node else [])]
        timed = {}
        for name in names:
            write, remove = getattr(state, f"write_{name}"), partial(state.remove, name)
            timed[f"write_{name}"] = partial(_time, world, write, remove)
        for name in names:
            timed[f"read_{name}"] = partial(_time, world, getattr(state, f"read_{name}"), state.drop_page_cache)
        with gloo_process_group(world) if one_node else nullcontext():
            seconds: dict[str, list[float]] = interleaved(timed, repeats)
    finally:
        if world.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
    seconds |= slowest(world, {"pause": state.pauses_s})
    return {
        **header(world, "checkpoint", before, repeats=repeats, state_bytes=state.num_bytes),
        "left_out": {} if one_node else {"dcp": "its process group here is limited to one node"},
        "variants": {
            name: {"seconds": quartiles(times), "gb_per_s": state.num_bytes / 1e9 / median(times)}
            for name, times in seconds.items()
        },
        "goals": [_evaluate(*goal, ratio(seconds[a], seconds[b])) for *goal, a, b in GOALS if a in seconds],
    }


def _evaluate(name: str, bound: str, expected: float, figure: float) -> dict[str, Any]:
    reached = figure >= expected if bound == ">=" else figure <= expected
    return {"goal": name, "figure": figure, "expected": expected, "reached": reached}


def _time(world: World, work: Callable[[], None], prepare: Callable[[], None]) -> float:
    """Return the slowest rank's seconds for work that all ranks begin together."""
    prepare()
    what = "reading or writing a checkpoint"

    def within_deadline() -> None:
        with world.deadline(what):
            work()

    return slowest_s(world, what, within_deadline)


def _fail(line: str) -> None:
    raise OSError(line)


if __name__ == "__main__":
    sys.exit(main())
