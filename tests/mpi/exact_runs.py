"""Exact runs on all ranks and on one, whose bits are compared."""

import sys
from dataclasses import replace
from pathlib import Path

from small_training import configure

from odc_mpi.checkpoint.commands import digest_line
from odc_mpi.observe.metrics import read_run_metrics
from odc_mpi.training.train import train

#: Beginnings of the names of metrics that depend on who did what.
OF_RANKS = ("bytes", "peak_", "tokens_per_s", "groups_", "microbatches", "slowest", "idle", "time", "outer_")
#: Runs on one rank, by what they depend on.
_references = {}


class ExactRuns:
    """Trains with the settings that `configure` returns for a directory and changes, such as `comm__prefetch=0`."""

    def __init__(self, world, base, configure):
        self._world, self.base, self._configure = world, base, configure

    @classmethod
    def of_sequences(cls, world, base, path, **own):
        """Return runs on the sequences of a data set, evaluated on held-out ones, with settings of a test's own."""
        usual = {
            "data__minibatch_sequences": 11,
            "run__exact": "true",
            "run__checkpoint_every": 50,
            "optim__adam_epsilon": 1e-8,
            "run__trace_steps": 0,
            "data__eval_path": path.with_suffix(".eval.h5"),
            "data__eval_sequences": 9,
        }
        return cls(world, base, lambda folder, changes: configure(path, **usual | own | changes, run__dir=folder))

    def train(self, name, among, **changes):
        """Return the digest and the metrics that do not depend on ranks. With a part of the world, the first trains."""
        found = None
        if self._world.rank < among.size:
            config = self._configure(self.base / name, changes)
            summary = train(config, among)
            lines = read_run_metrics(Path(config.run.dir), sys.maxsize)
            found = summary["parameters_digest"], [without_times(line) for line in lines]
        found = self._world.gather_objects(found)[0]
        assert digest_line(self.base / name).split()[0] == found[0]
        return found

    def alone(self, **changes):
        """The run on one rank."""
        key = repr(replace((config := self._configure(self.base / "alone", changes)), run=replace(config.run, dir="")))
        if key not in _references:
            _references[key] = self.train("alone", self._world.split("self"), **changes)
        return _references[key]


def without_times(line):
    return {name: value for name, value in line.items() if not (name.startswith(OF_RANKS) or name.endswith("_s"))}
