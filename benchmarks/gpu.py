"""Measure bandwidths of a GPU and its link, the CUDA kernels of odc_mpi, and the overhead of a training step.

    mpiexec -n 1 odc-mpi doctor; mpiexec -n 2 odc-mpi doctor     # needed only to measure MPI windows on GPUs
    mpiexec -n 2 python benchmarks/gpu.py [--parts bandwidths kernels step ranks] [--sizes 4M,16M,64M] [--repeats 7]
    mpiexec -n 1 python benchmarks/gpu.py --parts step [--config FILE] [--steps 4] [--contenders device_windows]

    bandwidths   all ranks: fetches of units to a GPU and pushes from it (`gpu_windows.py`)
    kernels      rank 0, while the others wait: the owner's add and `flatten` (`gpu_kernels.py`)
    step         rank 0 as a job of one rank, while the others wait: training compared with plain torch (`gpu_step.py`)
    ranks        all ranks: training compared with processes that exchange nothing (`gpu_ranks.py`)

MPI operations on GPU windows may crash or hang even if the doctor's tests passed. Everything is therefore measured
without them first; then, if they are to be used, `bandwidths`, `step` and `ranks` are measured again with them and all
other variants. Rank 0 prints the results so far as a line of JSON; the last line has all. `left_out` of the result
names failed parts, and `left_out` of a part failed contenders, each with a reason that begins with `failed`;
`agreement` there means that losses differ. The exit code is 1 after a failure.

    library, ranks, nodes, repeats, devices, torch, load_average ([before, after], the node's over a minute)
    left_out     {what: reason}: variants, parts, and `step_device_windows`, `ranks_device_windows`
    sizes        a list of {size_bytes, num_units, crossing_bytes (of a unit, owned by other ranks), variants}
                 variants: {variant: {seconds, gb_per_s, of_copy, of_link}}, for one operation and the full unit
    kernels      a list of {size_bytes (of a shard in fp32), slots, pieces, tasks}
                 tasks: {task: {moved_bytes, seconds, gb_per_s, of_copy, of_torch}}
    step, ranks  steps, param_dtype, model_numel, reduction, loss_deviation, tolerance, losses, left_out, and for each
                 contender: seconds, tokens_per_s (of a minibatch), overhead (odc_mpi's time divided by plain torch's in
                 the same round, minus 1), mfu (share of the GPU's peak in bf16, of 6 FLOPs per parameter and token and
                 those of attention; None if the peak is unknown), peak_bytes (GPU memory, `gpu_memory.py`)

`seconds`, `gb_per_s` and `overhead` are {low, median, high}, the quartiles over the rounds; keys that begin with `of_`
are speeds as multiples of another variant's, medians over rounds.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_kernels
import gpu_ranks
import gpu_step
import gpu_windows
import torch
from measure import header, make_progress_printer, parse_sizes
from transport_speed import REDUCTIONS

from odc_mpi.api import decide_for
from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.comm.kernels.native import kernels_unavailable_reason
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.windows.device_window import mapping_error
from odc_mpi.errors import AllRanksUserError, UserError, one_line_message
from odc_mpi.formatting import format_size
from odc_mpi.probe.device_probe import allocation_error
from odc_mpi.runtime.ranks import run_on_all_ranks
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config

#: Parts that can be measured separately.
PARTS = ("bandwidths", "kernels", "step", "ranks")
#: Contenders of `step` and `ranks` that can be measured separately.
CONTENDERS = (gpu_step.PLAIN, *gpu_step.COMM)
#: Called with the result so far and a line about the next measurement.
ReportFunction = Callable[[dict[str, Any], str], None]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        sizes: Sizes of units, and of shards, in bytes.
        repeats: Number of rounds.
        steps: Minibatches per round.
        config: Path of a configuration of `odc-mpi train`; None for the benchmark's own.
        window_device: Windows on GPUs: auto, if a doctor has proved them; cuda, always; cpu, never.
        timeout_s: Maximum seconds of a wait.
        parts: Subset of `PARTS`.
        contenders: Subset of `CONTENDERS`; `plain` is measured in any case.
    """

    sizes: Sequence[int]
    repeats: int
    steps: int
    config: str | None = None
    window_device: str = "auto"
    timeout_s: float = 900.0
    parts: Sequence[str] = PARTS
    contenders: Sequence[str] = CONTENDERS


def main() -> int:
    """Measure, let rank 0 print the object after each part, and return the exit code. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4M,16M,64M,256M", help="sizes of units and shards")
    parser.add_argument("--config", help="configuration of odc-mpi train; default: a model in bf16 of 1 B parameters")
    parser.add_argument("--steps", type=int, default=4, help="minibatches per round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument(
        "--window-device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: if the doctor has proved them"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="by default all")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="maximum seconds of a wait for another rank")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="of steps")
    given = parser.parse_args()
    world = World(timeout_s=given.timeout_s, limit="--timeout-s")

    def report(result: dict[str, Any], operation: str = "") -> None:
        if world.rank == 0 and any(result[key] for key in ("sizes", "kernels", "step", "ranks")):
            print(json.dumps(result), flush=True)
        if operation:
            make_progress_printer(world.rank)(operation)

    result: dict[str, Any] = {}

    def work() -> None:
        device = world.run_on_all(lambda: _find(world.host_rank))
        options = Options(**{**vars(given), "sizes": parse_sizes(given.sizes)})
        result.update(measure(world, device, options, report))
        report(result)

    return run_on_all_ranks(world, work) or int(gpu_step.failed(result))


def _find(host_rank: int) -> Device:
    if not torch.cuda.is_available():
        raise UserError(f"expected a GPU, torch {torch.__version__} sees none")
    device = find_device("cuda", host_rank)
    assert device is not None
    device.set_current()
    return device


def measure(
    world: World, device: Device, options: Options, report: ReportFunction = lambda result, operation: None
) -> dict[str, Any]:
    """Measure all parts. Collective.

    Args:
        device: GPU of this rank; all ranks have one.
        options: The same on every rank.
        report: Called on every rank before each part.

    Returns:
        The object that the module's docstring describes; parts that rank 0 measures alone are missing on other ranks.

    Raises:
        AllRanksUserError: A setting is not supported.
        RuntimeError: A result is wrong.
    """
    before = os.getloadavg()[0]
    objections = gpu_windows.reduction_objections(world, device, options.window_device)
    devices = sorted(set(world.gather_objects(device.name)))
    with ExitStack() as stack:
        configs = world.run_on_all(lambda: _configurations(options, stack) if world.rank == 0 else {})
        # The data is in a temporary directory of rank 0's node.
        part = _Parts(world, device, options, world.gather_objects(configs)[0], report)
        part.result = {
            **header(world, "gpu", before, repeats=options.repeats, devices=devices, torch=torch.__version__),
            "left_out": gpu_windows.left_out(objections),
            "sizes": [],
            "kernels": [],
            "step": None,
            "ranks": None,
        }
        usable = [name for name in REDUCTIONS if name not in objections]
        measured = {"bandwidths": part.bandwidths, "kernels": part.kernels, "step": part.step, "ranks": part.ranks}
        for name in PARTS:
            if name in options.parts:
                measured[name]()
            else:
                part.result["left_out"][name] = "not requested (--parts)"
        if usable and "bandwidths" in options.parts:
            part.bandwidths(usable)
        if "step" in options.parts:
            part.step(on_device=True)
        if "ranks" in options.parts:
            part.ranks(on_device=True)
    part.result["load_average"] = [before, os.getloadavg()[0]]
    return part.result


class OmittedError(Exception):
    """A measurement that is not possible or not requested."""


class _Parts:
    """The parts of the benchmark, each of which adds to the result. Construction is collective.

    Args:
        configs: Configurations of the parts `step` and `ranks`.
        report: Called with the result so far before each part.
    """

    def __init__(
        self,
        world: World,
        device: Device,
        options: Options,
        configs: dict[str, Config],
        report: ReportFunction,
    ) -> None:
        self._world, self._device, self._options, self._configs, self._report = world, device, options, configs, report
        self._threads = world.cores_per_rank()
        self.result: dict[str, Any] = {}

    def bandwidths(self, reductions: Sequence[str] = ()) -> None:
        """Measure all sizes, with windows on devices for these reductions. Collective."""
        torch.set_num_threads(self._threads)  # also after steps, whose configuration may have another number
        mapped = self._options.window_device != "cpu" and mapping_error(self._world, self._device) is None
        where = " with windows on GPUs" if reductions else ""
        for i, num_bytes in enumerate(self._options.sizes):
            self._report(self.result, f"units of {format_size(num_bytes)}{where}")
            size = gpu_windows.measure_size(
                self._world, self._device, num_bytes, self._options.repeats, reductions, mapped=mapped
            )
            self.result["sizes"][i : i + 1] = [size]
        self._free()

    def kernels(self) -> None:
        """Measure the kernels on rank 0. Collective."""
        reason = kernels_unavailable_reason(self._device.torch_device)
        if reason is not None:
            self.result["left_out"]["kernels"] = reason
        for num_bytes in self._options.sizes:
            self._report(self.result, f"kernels on shards of {format_size(num_bytes)}")
            measured, failure = self._on_first(
                lambda num_bytes=num_bytes: gpu_kernels.measure_size(  # type: ignore[misc]
                    self._device, num_bytes, self._options.repeats, reason is None
                )
            )
            self._keep("kernels", self.result["kernels"] + [measured] * (failure is None), failure)
            self._free()

    def step(self, *, on_device: bool = False) -> None:
        """Measure a training step on rank 0. Collective.

        Args:
            on_device: Measure windows on the device, too, if they are to be used.
        """
        names = self._names(on_device)
        if names:
            self._report(self.result, f"steps of {', '.join(names)}")
            measured, failure = self._on_first(lambda: self._steps(names))
            self._keep("step", measured, failure, on_device)

    def ranks(self, *, on_device: bool = False) -> None:
        """Measure training on all ranks, with windows on the device, too, if they are to be used. Collective."""
        names = [name for name in self._names(on_device) if name != gpu_step.COPIES]
        failure = "requires 2 ranks or more" if self._world.size == 1 else None
        if names and not failure and on_device:
            failure = self._objection(self._world)
        measured = None
        if names and not failure:
            self._report(self.result, f"ranks, {', '.join(names)}")
            options, config = self._options, self._configs["ranks"]
            try:
                measured = gpu_ranks.measure(
                    self._world, config, self._device, names, options.steps, options.repeats, self._report_progress
                )
            except AllRanksUserError as error:
                failure = f"failed: {error}"
        if names:
            self._keep("ranks", measured, failure, on_device)

    def _names(self, on_device: bool) -> list[str]:
        """Return the contenders to measure: without those on the device first, then all of them."""
        wanted = [name for name in gpu_step.COMM if name in self._options.contenders]
        if on_device:
            return [] if wanted == [gpu_step.HOST] else wanted
        return [name for name in wanted if name == gpu_step.HOST]

    def _steps(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the entry `step`."""
        with self._world.split("self") as self_world:
            if names != [gpu_step.HOST] and (reason := self._objection(self_world)):
                raise OmittedError(reason)
            options = self._options
            torch.set_num_threads(self._threads)
            return gpu_step.measure(
                self_world,
                self._configs["step"],
                self._device,
                names,
                options.steps,
                options.repeats,
                self._report_progress,
            )

    def _report_progress(self, what: str) -> None:
        self._report(self.result, what)

    def _objection(self, world: World) -> str | None:
        """Return the reason against windows of these ranks on their devices, or None. Collective in `world`."""
        if self._options.window_device == "cpu":
            return gpu_windows.SET
        try:
            decision = decide_for(world, CommConfig(window_device=self._options.window_device), device="cuda")
        except UserError as error:
            return str(error)
        choice = decision.window_device
        assert choice is not None
        if choice.value == "cpu":
            return f"on {world.size} ranks: {choice.reason}"
        return allocation_error(world, self._device, gpu_windows.MIN_BYTES)

    def _keep(self, name: str, measured: Any, failure: str | None, on_device: bool = False) -> None:
        """Add an entry to the result, or the reason why it is missing, and free memory."""
        if failure is not None:
            self.result["left_out"][f"{name}_device_windows" if on_device else name] = failure
        else:
            self.result[name] = measured
        self._free()

    def _on_first(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """Call a function on rank 0 while the others wait, and broadcast its result and error. Collective."""
        done, failure = None, None
        if self._world.rank == 0:
            try:
                done = work()
            except OmittedError as error:
                failure = str(error)
            except Exception as error:  # other parts are measured all the same
                failure = f"failed: {type(error).__name__}: {one_line_message(error)}"
        self._world.wait_collective(self._world.comm.Ibarrier(), "waiting for measurements of rank 0")
        done, failure = self._world.gather_objects((done, failure))[0]
        return done, failure

    def _free(self) -> None:
        """Free the GPU memory that torch caches."""
        gc.collect()
        if self._device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _configurations(options: Options, stack: ExitStack) -> dict[str, Config]:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="odc_mpi-bench-")))
    path = Path(options.config) if options.config else None
    layers = {"step": None, "ranks": gpu_ranks.LAYERS}
    return {
        part: gpu_step.configuration(path, directory / f"{part}.h5", options.timeout_s, layers[part])
        for part in layers
        if part in options.parts
    }


if __name__ == "__main__":
    sys.exit(main())
