"""Jobs for the tests: a training that takes some seconds, submitted with the templates."""

import json

from mpi_launch import ROOT, wait_until
from small_run import write_config

#: Steps of every training here: long enough to be interrupted in the middle.
STEPS = 90
#: For any job to end, those before it in the queue included, in seconds. Every rank imports torch on two shared cores.
LIMIT_S = 600


class Directory:
    """A directory in which jobs run, with a configuration; by default on one rank for each job and node."""

    def __init__(self, cluster, path, data):
        self.cluster = cluster
        self.path = path
        self.data = data
        self.config = write_config(data, path)

    def submit(self, template, *arguments, options=(), **env):
        """Submit one of jobs/; return the job's number."""
        small = ["--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", *options]
        done = self.cluster.run(
            "sbatch", *small, ROOT / "jobs" / f"{template}.sbatch", *arguments, cwd=self.path, **env
        )
        assert done.code == 0, done.err
        return int(done.out)

    def command(self, line, *options):
        """Submit a command without a template; return the job's number."""
        done = self.cluster.run(
            *("sbatch", "--parsable", "--ntasks-per-node=1", "--output=command-%j.out", *options, f"--wrap={line}"),
            cwd=self.path,
        )
        assert done.code == 0, done.err
        return int(done.out)

    def train(self, template, *arguments, **options):
        """Submit a training under its own name."""
        settings = ["--run.steps", STEPS, "--optim.lr_scheduler_type", "constant"]
        return self.submit(template, "--config", self.config, *settings, *arguments, **options)

    @staticmethod
    def records(name):
        """Settings for a run in a directory of this name, and its ranks' files beside it."""
        return ["--run.dir", name, "--run.log_dir", f"{name}-logs"]

    def finish(self, job, state="COMPLETED", timeout_s=LIMIT_S):
        """Wait for the end of a job, which has to be this one; return its output."""
        fields = self.cluster.wait(job, timeout_s)
        output = "".join(path.read_text() for path in self.path.glob(f"*-{job}.out"))
        assert fields["JobState"] == state, f"{fields}\n{output}"
        return output

    def steps(self, run="run"):
        """The lines of a run's metrics.jsonl, so far."""
        path = self.path / run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def losses(self, run="run"):
        return [line["loss"] for line in self.steps(run)]

    def summary(self, run="run"):
        return json.loads((self.path / run / "summary.json").read_text())

    def wait_for_steps(self, number, run):
        """Wait until a run has done so many steps."""
        assert wait_until(lambda: len(self.steps(run)) >= number, LIMIT_S), run

    def wait_for_checkpoint(self, run):
        """Wait until a run has published a checkpoint."""
        assert wait_until(lambda: any((self.path / run).glob("checkpoints/step_*")), LIMIT_S), run
