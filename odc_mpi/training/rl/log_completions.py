"""A few completions of a run with their rewards, for people: on the terminal and in completions.jsonl."""

import json
from pathlib import Path
from typing import Any

from odc_mpi.files import warn_write_failed
from odc_mpi.formatting import truncate_text
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.runtime.world import World
from odc_mpi.training.rl.source import RolloutSource
from odc_mpi.training.rundir.records import COMPLETIONS


class LogCompletions(Callback):
    """Writes and shows every `every` steps the completions that the source has kept."""

    def __init__(self, world: World, source: RolloutSource, run_dir: Path, every: int) -> None:
        self._world, self._source, self._every = world, source, every
        self._path = run_dir / COMPLETIONS

    def on_step_end(self, step: Step) -> None:
        """Gather and write completions. Collective, in the steps in which they are due."""
        if step.number % self._every:
            return
        lines = [
            line
            for lines_of_rank in self._world.gather_objects(self._source.logged_completions)
            for line in lines_of_rank
        ]
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
