"""Log of some completions with their rewards, on the terminal and in completions.jsonl."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from odc_mpi.files import warn_write_failed
from odc_mpi.formatting import truncate_text
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.runtime.world import World
from odc_mpi.training.rl.source import RolloutSource
from odc_mpi.training.rundir.records import COMPLETIONS


class LogCompletions(Callback):
    """Records and prints `logged_completions` of the source every `every` steps."""

    def __init__(self, world: World, source: RolloutSource, run_dir: Path, every: int) -> None:
        self._world, self._source, self._every = world, source, every
        self._path = run_dir / COMPLETIONS

    def on_step_end(self, step: Step) -> None:
        """Gather and record the completions, if it is due. Collective."""
        if step.number % self._every:
            return
        lines = list(chain.from_iterable(self._world.gather_objects(self._source.logged_completions)))
        if self._world.rank == 0:
            self._write(lines)
            for line in lines[:2]:
                prompt, completion = (
                    truncate_text(json.dumps(line[key], ensure_ascii=False), 120) for key in ("prompt", "completion")
                )
                print(f"  {prompt} -> {completion}  reward {line['reward']}", flush=True)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            warn_write_failed(self._path, error)
