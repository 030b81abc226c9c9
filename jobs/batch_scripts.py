"""Writes the batch scripts of this folder, from the same parts as odc-mpi job: python jobs/batch_scripts.py."""

from dataclasses import replace
from pathlib import Path

from odc_mpi.slurm.job import BINDING, Job, head, site, training

_SWEEP = """\

# One line of settings for each number in --array above.
settings=(
    "--optim.learning_rate 1e-5"
    "--optim.learning_rate 3e-5"
    "--optim.learning_rate 1e-4"
)
read -ra own <<< "${settings[SLURM_ARRAY_TASK_ID]?there is no line of settings for number $SLURM_ARRAY_TASK_ID}"
directory=runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID
set -- "$@" "${own[@]}" --run.dir "$directory" --run.log_dir "$directory/logs"
"""
_COMMAND = """\

srun --kill-on-bad-exit=1 "${{binding[@]}}" "${{container[@]}}" {command}
"""


def command(job: Job, headline: str, usage: str, words: str) -> str:
    """Return the batch script of a command that ends by itself; arguments as for `training`."""
    parts = [head(job, headline, usage), site(job, "%x-%j.out"), BINDING, _COMMAND.format(command=words)]
    return "".join(parts)


def templates() -> dict[str, str]:
    """Return the files of jobs/ by name. Local."""

    def usage(name: str) -> str:
        return f"sbatch jobs/{name}.sbatch --config CONFIG [--section.key value ...]"

    few = Job(nodes=2, ranks_per_node=2, time="00:30:00")
    return {
        "single_node": training(
            Job(),
            "Training on one node: it saves before its time is up, queues again and goes on by itself.",
            usage("single_node"),
        ),
        "multi_node": training(
            Job(nodes=2),
            "Training on several nodes: it saves before its time is up, queues again and goes on by itself.",
            usage("multi_node"),
        ),
        "sweep": training(
            Job(name="sweep"),
            "Trainings that differ in some settings, as an array of jobs, each of which saves and goes on by itself.",
            usage("sweep"),
            array="0-2%2             # so many, two at a time",
            settings=_SWEEP,
        ),
        "doctor": command(
            replace(few, name="doctor"),
            "What MPI really does between the ranks of a node and between nodes: to run before any training.",
            "sbatch jobs/doctor.sbatch [--json]",
            'odc-mpi doctor "$@"',
        ),
        "bench": command(
            replace(few, name="bench"),
            "What fetches and pushes achieve between these nodes, in GB/s, beside MPI's own collectives.",
            "sbatch jobs/bench.sbatch [transport --sizes 64K,1M,16M ... | schedule --ranks 4 ...]",
            'odc-mpi bench "${@:-transport}"',
        ),
    }


if __name__ == "__main__":
    for name, script in templates().items():
        Path(__file__).with_name(f"{name}.sbatch").write_text(script)
