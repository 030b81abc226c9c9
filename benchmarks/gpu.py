"""Measure bandwidths of a GPU and its link, the CUDA kernels of odc_mpi, and the overhead of a training step.

    mpiexec -n 1 odc-mpi doctor; mpiexec -n 2 odc-mpi doctor     # else windows on GPUs are omitted
    mpiexec -n 2 python benchmarks/gpu.py [--parts bandwidths kernels step] [--sizes 4M,16M,64M,256M] [--repeats 7]
    mpiexec -n 1 python benchmarks/gpu.py --parts step [--config FILE] [--steps 4]

    bandwidths   all ranks: fetches of units to a GPU and pushes from it (`gpu_windows.py`)
    kernels      rank 0, while the others wait: the owner's add and `flatten` (`gpu_kernels.py`)
    step         rank 0 as a job of one rank, while the others wait: training compared with plain torch (`gpu_step.py`)

Operations on GPU windows may crash or hang even if a doctor has proved them. So all of the above is measured without
them first; then, if they are to be used, bandwidths and steps are measured again with them and with all other variants
in the same run. Rank 0 prints the object as a line of JSON after each part: the last line has all results.

    library, ranks, nodes, repeats, devices, torch, load_average ([before, after], the node's over a minute)
    left_out     {what: reason}: variants, `bandwidths`, `kernels`, `step`, `step_device_windows`
    sizes        a list of {size_bytes, num_units, crossing_bytes (of a unit, owned by other ranks), variants}
                 variants: {variant: {seconds, gb_per_s, of_copy, of_link}}, for one operation and the full unit
    kernels      a list of {size_bytes (of a shard in fp32), slots, pieces, tasks}
                 tasks: {task: {moved_bytes, seconds, gb_per_s, of_copy, of_torch}}
    step         steps, param_dtype, model_numel, reduction, loss_deviation, tolerance, losses, and for `plain`,
                 `host_windows`, `device_windows`: seconds, tokens_per_s (of a minibatch), overhead (odc_mpi's time
                 divided by plain torch's in the same round, minus 1)

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
import gpu_step
import gpu_windows
import torch

from odc_mpi.api import decide_for
from odc_mpi.bench.measure import header, make_progress_printer, parse_sizes
from odc_mpi.bench.transport import REDUCTIONS
from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.comm.kernels.native import kernels_unavailable_reason
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.formatting import format_size
from odc_mpi.probe.device_decision import summarize
from odc_mpi.probe.device_probe import allocation_error, load_device_report
from odc_mpi.probe.probe import environment_report
from odc_mpi.probe.report import ProbeReport
from odc_mpi.runtime.ranks import run_on_all_ranks
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config

#: Parts that can be measured separately.
PARTS = ("bandwidths", "kernels", "step")
#: Minimum free GPU memory for windows.
_MIN_BYTES = 1 << 20
#: Reason for omitting windows on GPUs that were not requested.
SET = "set by --window-device"
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
    """

    sizes: Sequence[int]
    repeats: int
    steps: int
    config: str | None = None
    window_device: str = "auto"
    timeout_s: float = 900.0
    parts: Sequence[str] = PARTS


def main() -> int:
    """Measure, let rank 0 print the object after each part, and return the exit code. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4M,16M,64M,256M", help="sizes of units and shards")
    parser.add_argument("--config", help="configuration of odc-mpi train; default: a model of 1 B parameters in bf16")
    parser.add_argument("--steps", type=int, default=4, help="minibatches per round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument(
        "--window-device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: if the doctor has proved them"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="by default all")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="maximum seconds of a wait for another rank")
    given = parser.parse_args()
    world = World(timeout_s=given.timeout_s, limit="--timeout-s")

    def report(result: dict[str, Any], doing: str = "") -> None:
        if world.rank == 0 and (result["sizes"] or result["kernels"] or result["step"]):
            print(json.dumps(result), flush=True)
        if doing:
            make_progress_printer(world.rank)(doing)

    def work() -> None:
        device = world.run_on_all(lambda: _find(world.host_rank))
        options = Options(**{**vars(given), "sizes": parse_sizes(given.sizes)})
        report(measure(world, device, options, report))

    return run_on_all_ranks(world, work)


def _find(host_rank: int) -> Device:
    if not torch.cuda.is_available():
        raise UserError(f"expected a GPU, torch {torch.__version__} sees none")
    device = find_device("cuda", host_rank)
    assert device is not None
    device.set_current()
    return device


def measure(
    world: World, device: Device, options: Options, report: ReportFunction = lambda result, doing: None
) -> dict[str, Any]:
    """Measure all parts. Collective.

    Args:
        device: GPU of this rank; all ranks have one.
        options: The same on every rank.
        report: Called on every rank before each part.

    Returns:
        The object that the module's docstring describes; parts that rank 0 measures alone are missing on other ranks.

    Raises:
        AgreedError: A setting is not supported, memory is insufficient, or losses differ; on every rank.
        RuntimeError: A result is wrong.
    """
    before = os.getloadavg()[0]
    against = reduction_objections(world, device, options.window_device)
    devices = sorted(set(world.gather_objects(device.name)))
    with ExitStack() as stack:
        wanted = world.rank == 0 and "step" in options.parts
        config = world.run_on_all(lambda: _configuration(options, stack) if wanted else None)
        part = _Parts(world, device, options, config, report)
        part.result = {
            **header(world, "gpu", before, repeats=options.repeats, devices=devices, torch=torch.__version__),
            "left_out": left_out(against),
            "sizes": [],
            "kernels": [],
            "step": None,
        }
        proved = [name for name in REDUCTIONS if name not in against]
        measured = {"bandwidths": part.bandwidths, "kernels": part.kernels, "step": part.step}
        for name in PARTS:
            if name in options.parts:
                measured[name]()
            else:
                part.result["left_out"][name] = "not requested (--parts)"
        if proved and "bandwidths" in options.parts:
            part.bandwidths(proved)
        part.step(on_device=True)
    part.result["load_average"] = [before, os.getloadavg()[0]]
    return part.result


def reduction_objections(world: World, device: Device, window_device: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Collective."""
    kept = load_device_report(world, device)
    against = judge(kept if kept is not None else environment_report(world), window_device)
    if len(against) == len(REDUCTIONS):
        return against
    troubles = [trouble for trouble in world.gather_objects(allocation_error(device, _MIN_BYTES)) if trouble]
    return dict.fromkeys(REDUCTIONS, troubles[0]) if troubles else against


def judge(report: ProbeReport, window_device: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Does not communicate."""
    if window_device == "cpu":
        return dict.fromkeys(REDUCTIONS, SET)
    if window_device == "auto":
        proof = summarize(report)
        return dict.fromkeys(REDUCTIONS, proof.objection) if proof.objection else dict(proof.reduction_objections)
    # Requested unconditionally; but the benchmark ends if an operation delivers wrong data.
    against = {}
    for kind in report.kinds:
        for name, operation in (("accumulate", "accumulate"), ("mailbox", "put")):
            if any(report.wrong_data("from_device", kind, needed) for needed in (operation, "get")):
                against[name] = "in odc-mpi doctor it delivered wrong data"
    return against


def left_out(against: dict[str, str]) -> dict[str, str]:
    """Return the variants that need windows on devices and have none, each with the reason."""
    reasons = {f"push_device_{name}": reason for name, reason in against.items()}
    if len(against) == len(REDUCTIONS):
        reasons = {"fetch_device": next(iter(against.values())), **reasons}
    return reasons


class _Parts:
    """The parts of the benchmark, each of which adds to the result. Construction is collective.

    Args:
        config: Configuration of the steps on rank 0; None on other ranks.
        report: Called with the result so far before each part.
    """

    def __init__(
        self, world: World, device: Device, options: Options, config: Config | None, report: ReportFunction
    ) -> None:
        self._world, self._device, self._options, self._config, self._report = world, device, options, config, report
        self._threads = world.cores_per_rank()
        self.result: dict[str, Any] = {}

    def bandwidths(self, reductions: Sequence[str] = ()) -> None:
        """Measure all sizes, with windows on devices for these reductions. Collective."""
        torch.set_num_threads(self._threads)  # also after steps, whose configuration may have another number
        where = " with windows on GPUs" if reductions else ""
        for i, num_bytes in enumerate(self._options.sizes):
            self._report(self.result, f"units of {format_size(num_bytes)}{where}")
            size = gpu_windows.measure_size(self._world, self._device, num_bytes, self._options.repeats, reductions)
            self.result["sizes"][i : i + 1] = [size]
        self._free()

    def kernels(self) -> None:
        """Measure the kernels on rank 0. Collective."""
        reason = kernels_unavailable_reason(self._device.torch_device)
        if reason is not None:
            self.result["left_out"]["kernels"] = reason
        for num_bytes in self._options.sizes:
            self._report(self.result, f"kernels on shards of {format_size(num_bytes)}")
            measured = self._on_first(
                lambda num_bytes=num_bytes: gpu_kernels.measure_size(  # type: ignore[misc]
                    self._device, num_bytes, self._options.repeats, reason is None
                )
            )
            self.result["kernels"].append(measured)
            self._free()

    def step(self, *, on_device: bool = False) -> None:
        """Measure a training step on rank 0. Collective.

        Args:
            on_device: Measure windows on the device, too, if they are to be used and memory sufficed for the rest.
        """
        if on_device and self.result["step"] is None:
            return
        self._report(self.result, f"steps{' with windows on GPUs' if on_device else ''}")
        measured, reason = self._on_first(lambda: self._steps(on_device))
        if reason is not None:
            self.result["left_out"]["step_device_windows" if on_device else "step"] = reason
        if measured is not None:
            self.result["step"] = measured
        self._free()

    def _steps(self, on_device: bool) -> tuple[dict[str, Any] | None, str | None]:
        """Return the entry `step` and the reason for a part that was omitted; None for either."""
        assert self._config is not None
        names = [gpu_step.HOST, *([gpu_step.DEVICE] if on_device else [])]
        with self._world.split("self") as alone:
            if on_device and (reason := self._against_step(alone)):
                return None, reason
            options = self._options

            def say(what: str) -> None:
                self._report(self.result, what)

            try:
                return gpu_step.measure(
                    alone, self._config, self._device, names, options.steps, options.repeats, say
                ), None
            except torch.OutOfMemoryError as error:
                errors = str(error).split(". ")[0]
                return None, f"the GPU's memory does not hold all models ({errors}): pass a smaller model with --config"

    def _against_step(self, alone: World) -> str | None:
        """Return the reason against windows of a single rank on its device, or None."""
        if self._options.window_device == "cpu":
            return SET
        try:
            decision = decide_for(alone, device="cuda", window_device=self._options.window_device)
        except UserError as error:
            return str(error)
        made = decision.window_device
        assert made is not None
        if made.value == "cpu":
            return f"on one rank: {made.reason}"
        return allocation_error(self._device, _MIN_BYTES)

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """Call a function on rank 0 while the others wait, and broadcast its result. Collective.

        Raises:
            AgreedError: The function raised a UserError.
        """
        done, error = None, None
        if self._world.rank == 0:
            try:
                done = work()
            except UserError as raised:
                error = str(raised)
        self._world.wait_collective(self._world.comm.Ibarrier(), "waiting for measurements of rank 0")
        done, error = self._world.gather_objects((done, error))[0]
        if error is not None:
            raise AllRanksUserError(error)
        return done

    def _free(self) -> None:
        """Free the GPU memory that torch caches."""
        gc.collect()
        if self._device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _configuration(options: Options, stack: ExitStack) -> Config:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="odc_mpi-bench-"))
    path = Path(options.config) if options.config else None
    return gpu_step.configuration(path, Path(directory) / "zipf.h5", options.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
