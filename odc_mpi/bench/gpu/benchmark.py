"""What a GPU, its link and our kernels give, and what our runtime costs a step there: `odc-mpi bench gpu`.

    bandwidths   all ranks: units that come to a GPU and leave it (`bench.gpu.windows`)
    kernels      rank 0, while the others wait: the owner's add and `flatten` (`bench.gpu.kernels`)
    step         rank 0 as a job of one rank, while the others wait: training beside plain torch (`bench.gpu.step`)

What uses windows on GPUs may crash or hang whatever a doctor has proved. So all of the above is measured without them
first; then, where they are to be used, bandwidths and steps once more with them, everything else beside them anew in
the same run. Whoever calls hears what is known before each part, and loses nothing of it.

`measure` returns, and `--json` prints, the object of docs/gpu.md.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odc_mpi.api import decide_for
from odc_mpi.bench.fetch_and_push import REDUCTIONS
from odc_mpi.bench.gpu import kernels as gpu_kernels
from odc_mpi.bench.gpu import step as gpu_step
from odc_mpi.bench.gpu import windows as gpu_windows
from odc_mpi.bench.gpu.run import PARTS
from odc_mpi.bench.together import header
from odc_mpi.comm.device.device import Device
from odc_mpi.comm.kernels.native import why_no_kernels
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.runtime.world import World
from odc_mpi.stack.device_decision import prove
from odc_mpi.stack.device_probe import kept_verdict, memory_trouble
from odc_mpi.stack.probe import bare_report
from odc_mpi.stack.report import Report
from odc_mpi.train.settings import Config
from odc_mpi.wording import format_size

#: Without room for so much a GPU has none for windows.
_LEAST_BYTES = 1 << 20
#: Why there are no windows on GPUs where nobody wants them.
SET = "set by --window-device"
#: Hears what is known so far, what is measured next, and whether that may end the process.
Listener = Callable[[dict[str, Any], str, bool], None]


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes:
        sizes: Of units, and of shards, in bytes.
        repeats: Rounds.
        steps: Minibatches of a round.
        config: A configuration of `odc-mpi train`; None for the benchmark's own.
        window_device: Windows on GPUs: auto, where a doctor has proved them; cuda, in any case; cpu, not at all.
        ranks: How many there are to be; None for any.
        timeout_s: Seconds that a wait may last.
        parts: Some of `PARTS`.
    """

    sizes: Sequence[int]
    repeats: int
    steps: int
    config: str | None = None
    window_device: str = "auto"
    ranks: int | None = None
    timeout_s: float = 900.0
    parts: Sequence[str] = PARTS


def measure(
    world: World, device: Device, options: Options, tell: Listener = lambda result, doing, may_end: None
) -> dict[str, Any]:
    """Measure everything. Collective.

    Args:
        world: The ranks.
        device: This rank's; all ranks have one.
        options: The same on every rank.
        tell: Called on every rank before each part.

    Returns:
        What the module's docstring describes; on other ranks than the first without what that one measures alone.

    Raises:
        AgreedError: A setting asks for what cannot be, too little memory, or losses differ; on every rank.
        RuntimeError: Something came out wrong.
    """
    before = os.getloadavg()[0]
    against = against_reductions(world, device, options.window_device)
    devices = sorted(set(world.gather_objects(device.name)))
    with ExitStack() as stack:
        wanted = world.rank == 0 and "step" in options.parts
        config = world.agree(lambda: _configuration(options, stack) if wanted else None)
        part = _Parts(world, device, options, config, tell)
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
                part.result["left_out"][name] = "not asked for (--parts)"
        if proved and "bandwidths" in options.parts:
            part.bandwidths(proved)
        part.step(on_device=True)
    part.result["load_average"] = [before, os.getloadavg()[0]]
    return part.result


def against_reductions(world: World, device: Device, wish: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Collective."""
    kept = kept_verdict(world, device)
    against = judge(kept if kept is not None else bare_report(world), wish)
    if len(against) == len(REDUCTIONS):
        return against
    troubles = [trouble for trouble in world.gather_objects(memory_trouble(device, _LEAST_BYTES)) if trouble]
    return dict.fromkeys(REDUCTIONS, troubles[0]) if troubles else against


def judge(report: Report, wish: str) -> dict[str, str]:
    """Return the reductions not to measure with windows on devices, each with the reason. Local."""
    if wish == "cpu":
        return dict.fromkeys(REDUCTIONS, SET)
    if wish == "auto":
        proof = prove(report)
        return dict.fromkeys(REDUCTIONS, proof.against) if proof.against else dict(proof.against_reductions)
    # Asked for in any case; but the benchmark itself ends where something arrives wrongly.
    against = {}
    for kind in report.kinds:
        for name, operation in (("accumulate", "accumulate"), ("mailbox", "put")):
            if any(report.is_wrong("from_device", kind, needed) for needed in (operation, "get")):
                against[name] = "odc-mpi doctor has seen it deliver wrong data"
    return against


def left_out(against: dict[str, str]) -> dict[str, str]:
    """Return the variants that need windows on devices and have none, each with the reason. Local."""
    reasons = {f"push_device_{name}": reason for name, reason in against.items()}
    if len(against) == len(REDUCTIONS):
        reasons = {"fetch_device": next(iter(against.values())), **reasons}
    return reasons


class _Parts:
    """The parts of the benchmark, each of which adds to the result. Making it is collective.

    Args:
        world: The ranks.
        device: This rank's.
        options: What is asked for.
        config: For the steps; None on other ranks than the first.
        tell: Hears what comes next.
    """

    def __init__(self, world: World, device: Device, options: Options, config: Config | None, tell: Listener) -> None:
        self._world, self._device, self._options, self._config, self._tell = world, device, options, config, tell
        self._threads = world.cores_per_rank()
        self.result: dict[str, Any] = {}

    def bandwidths(self, reductions: Sequence[str] = ()) -> None:
        """Measure all sizes, with windows on devices for these reductions. Collective."""
        torch.set_num_threads(self._threads)  # also after steps, whose configuration may have another number
        where = " with windows on GPUs" if reductions else ""
        for i, num_bytes in enumerate(self._options.sizes):
            self._tell(self.result, f"units of {format_size(num_bytes)}{where}", bool(reductions))
            size = gpu_windows.measure_size(self._world, self._device, num_bytes, self._options.repeats, reductions)
            self.result["sizes"][i : i + 1] = [size]
        self._free()

    def kernels(self) -> None:
        """Measure the kernels on rank 0. Collective."""
        reason = why_no_kernels(self._device.torch_device)
        if reason is not None:
            self.result["left_out"]["kernels"] = reason
        for num_bytes in self._options.sizes:
            self._tell(self.result, f"kernels on shards of {format_size(num_bytes)}", False)
            measured = self._on_first(
                lambda num_bytes=num_bytes: gpu_kernels.measure_size(  # type: ignore[misc]
                    self._device, num_bytes, self._options.repeats, reason is None
                )
            )
            self.result["kernels"].append(measured)
            self._free()

    def step(self, *, on_device: bool = False) -> None:
        """Measure what a step costs on rank 0. Collective.

        Args:
            on_device: With windows on the device too, if they are to be used and memory sufficed for the rest.
        """
        if on_device and self.result["step"] is None:
            return
        self._tell(self.result, f"steps{' with windows on GPUs' if on_device else ''}", on_device)
        measured, reason = self._on_first(lambda: self._steps(on_device))
        if reason is not None:
            self.result["left_out"]["step_device_windows" if on_device else "step"] = reason
        if measured is not None:
            self.result["step"] = measured
        self._free()

    def _steps(self, on_device: bool) -> tuple[dict[str, Any] | None, str | None]:
        """Return the entry `step` and the reason for a part that was left out; None for either. Local."""
        assert self._config is not None
        names = [gpu_step.HOST, *([gpu_step.DEVICE] if on_device else [])]
        with self._world.alone() as alone:
            if on_device and (reason := self._against_step(alone)):
                return None, reason
            options = self._options

            def say(what: str) -> None:
                self._tell(self.result, what, on_device)

            try:
                return gpu_step.measure(
                    alone, self._config, self._device, names, options.steps, options.repeats, say
                ), None
            except torch.OutOfMemoryError as error:
                told = str(error).split(". ")[0]
                return None, f"the GPU's memory does not hold all models ({told}): give a smaller one with --config"

    def _against_step(self, alone: World) -> str | None:
        """Return the reason not to have the windows of a single rank on its device, None if there is none. Local."""
        if self._options.window_device == "cpu":
            return SET
        try:
            decision = decide_for(alone, device="cuda", window_device=self._options.window_device)
        except UserError as error:
            return str(error)
        made = decision.window_device
        assert made is not None
        if made.choice == "cpu":
            return f"on one rank: {made.reason}"
        return memory_trouble(self._device, _LEAST_BYTES)

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """Let rank 0 work while the others wait, and give all what came of it. Collective.

        Raises:
            AgreedError: It raised a UserError.
        """
        done, error = None, None
        if self._world.rank == 0:
            try:
                done = work()
            except UserError as raised:
                error = str(raised)
        self._world.meet(self._world.comm.Ibarrier(), "waiting for what rank 0 measures alone")
        done, error = self._world.gather_objects((done, error))[0]
        if error is not None:
            raise AgreedError(error)
        return done

    def _free(self) -> None:
        """Give the GPU's memory back that torch keeps for later. Local."""
        gc.collect()
        if self._device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _configuration(options: Options, stack: ExitStack) -> Config:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="odc_mpi-bench-"))
    path = Path(options.config) if options.config else None
    return gpu_step.configuration(path, Path(directory) / "zipf.h5", options.timeout_s)
