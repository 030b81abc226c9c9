"""Writes the batch scripts of this folder, from the same parts as odc-mpi job: python jobs/batch_scripts.py."""

from pathlib import Path

from odc_mpi.slurm.job import SlurmJob, training_script

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


def templates() -> dict[str, str]:
    """Return the files of jobs/ by name. Local."""

    def usage(name: str) -> str:
        return f"sbatch jobs/{name}.sbatch --config CONFIG [--section.key value ...]"

    return {
        "train": training_script(
            SlurmJob(),
            "Training: it saves before its time is up, queues again and goes on by itself.",
            usage("train"),
        ),
        "sweep": training_script(
            SlurmJob(name="sweep"),
            "Trainings that differ in some settings, as an array of jobs, each of which saves and goes on by itself.",
            usage("sweep"),
            array="0-2%2             # so many, two at a time",
            settings=_SWEEP,
        ),
    }


if __name__ == "__main__":
    for name, script in templates().items():
        Path(__file__).with_name(f"{name}.sbatch").write_text(script)
