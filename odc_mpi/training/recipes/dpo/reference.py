"""Log-probabilities of the answers under the reference model, computed once before the first step.

The reference model is the model at that time, when new adapters have no effect yet, so no second model is in memory.
After every `BLOCK` pairs, the results are written to `reference_logps.npz` in the run directory, with digests of the
data and the model. A restarted run, on any number of ranks, computes the rest.
"""

import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.errors import AllRanksUserError, one_line_message, warn
from odc_mpi.files import atomic_write
from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.training.evaluation import ForwardPass
from odc_mpi.training.preferences.answer_logps import AnswerLogps
from odc_mpi.training.rundir.run_dir_lock import convert_write_errors

FILE = "reference_logps.npz"
#: Number of pairs between writes of the results, independent of the number of ranks (as is packing with `run.exact`).
BLOCK = 4096
#: Function that returns the indices, int64 `[n]`, of pairs that a run still needs, given its number of completed steps.
NeededPairs = Callable[[int], npt.NDArray[np.int64]]


class ReferenceLogps(Callback):
    """Computes or loads reference log-probabilities of answers. Evaluators must come after it in the list of callbacks.

    Args:
        passes: Forward pass and `NeededPairs` function for the training data and, if any, for the held-out data.
        directories: Directories to search for stored log-probabilities. New ones are stored in the first, `run.dir`.
        compute_digest: Collective function that returns a digest of the current model.
        check_stop: Collective function that raises an error on all ranks if a stop was requested.

    Attributes:
        values: For each pass, the log-probabilities of all answers, float64 `[pairs, 2]`. Unknown ones are NaN.
        model_digest: Digest of the reference model. Unless it was restored, it is None until `on_train_begin`.
    """

    def __init__(
        self,
        world: World,
        answer_logps: AnswerLogps,
        passes: Sequence[tuple[ForwardPass, NeededPairs]],
        directories: Sequence[Path],
        compute_digest: Callable[[], str],
        check_stop: Callable[[], None],
    ) -> None:
        self._world, self._answer_logps = world, answer_logps
        self._passes, self._directories = passes, directories
        self._compute_digest, self._check_stop = compute_digest, check_stop
        self.model_digest: str | None = None
        sizes = [len(forward_pass.dataset) for forward_pass, _ in passes]
        self.values = [torch.full((size, 2), torch.nan, dtype=torch.float64) for size in sizes]

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Load or compute the log-probabilities. Raises `AllRanksUserError` if a resumed run lacks any. Collective."""
        if self.model_digest is None:
            self.model_digest = self._compute_digest()
        self._load()
        missing = []
        for (_, find_needed), values in zip(self._passes, self.values, strict=True):
            needed = find_needed(completed_steps)
            missing.append(needed[values[needed, 0].isnan().numpy()])
        num_missing = sum(map(len, missing))
        if not num_missing:
            return
        if completed_steps:
            raise AllRanksUserError(
                f"run.dir: {self._directories[-1] / FILE} is missing, or lacks log-probabilities of {num_missing:,} "
                "pairs, which cannot be computed after training has begun: restore it, set run.steps, data.eval_path "
                "and data.eval_sequences as before, or set run.resume to never to start over"
            )
        began = time.perf_counter()
        for (forward_pass, _), values, indices in zip(self._passes, self.values, missing, strict=True):
            self._compute_missing(forward_pass, values, indices)
        if self._world.rank == 0:
            elapsed_s = time.perf_counter() - began
            print(f"reference log-probabilities of {num_missing:,} pairs computed in {elapsed_s:.1f} s", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the reference model as the entry `reference`."""
        return {"reference": self.model_digest}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the digest of the reference model."""
        self.model_digest = state_dict["reference"]

    def _compute_missing(self, forward_pass: ForwardPass, values: torch.Tensor, missing: npt.NDArray[np.int64]) -> None:
        for begin in range(0, len(missing), BLOCK):
            self._check_stop()
            self._world.set_status(f"computing reference log-probabilities, pair {begin:,} of {len(missing):,}")
            for indices, logps in forward_pass.run(forward_pass.plan(missing[begin : begin + BLOCK]), self._score):
                values[indices] = logps
            self._world.run_on_all(self._write if self._world.rank == 0 else lambda: None)

    def _score(self, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(microbatch.indices), self._answer_logps(microbatch).logps.cpu()

    def _by_digest(self) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of each data set, keyed by the digests of the model and of the data set."""
        return {
            f"{self.model_digest}_{forward_pass.dataset.digest()}": values
            for (forward_pass, _), values in zip(self._passes, self.values, strict=True)
        }

    def _load(self) -> None:
        """Read stored log-probabilities of this model and data on rank 0, and broadcast them. Collective."""
        if self._world.rank == 0:
            for directory in self._directories:
                self._read(directory / FILE)
        for values in self.values:
            self._world.broadcast(values)

    def _read(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:  # a zip file, whose checksums are verified
                for digest, values in self._by_digest().items():
                    if digest in file:
                        stored = torch.from_numpy(file[digest])
                        values[:] = torch.where(values.isnan(), stored, values)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RuntimeError, TypeError, EOFError, zipfile.BadZipFile) as error:
            warn(f"WARNING: {path} cannot be read, its log-probabilities are not used: {one_line_message(error)}")

    def _write(self) -> None:
        path = self._directories[0] / FILE
        with convert_write_errors(path), atomic_write(path) as new, new.open("wb") as file:
            arrays = {digest: values.numpy() for digest, values in self._by_digest().items()}
            np.savez(file, **arrays)  # type: ignore[arg-type]
