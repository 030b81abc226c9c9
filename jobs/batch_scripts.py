"""Write the batch scripts of this folder, from the parts that odc-mpi job uses: python jobs/batch_scripts.py."""

from pathlib import Path

from odc_mpi.jobs.scripts import SlurmJob

_SWEEP = """\

# One line of settings for each index in --array above.
settings=(
    "--optim.learning_rate 1e-5"
    "--optim.learning_rate 3e-5"
    "--optim.learning_rate 1e-4"
)
read -ra task <<< "${settings[SLURM_ARRAY_TASK_ID]?there is no line of settings for index $SLURM_ARRAY_TASK_ID}"
directory=runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID
set -- "$@" "${task[@]}" --run.dir "$directory" --run.log_dir "$directory/logs"
"""


def templates() -> dict[str, str]:
    """Return the batch scripts of jobs/ by name."""

    def usage(name: str) -> str:
        return f"sbatch jobs/{name}.sbatch --config CONFIG [--section.key value ...]"

    return {
        "train": SlurmJob(
            "Training. The job saves before its time limit, requeues itself and resumes.", usage("train")
        ).script(),
        "sweep": SlurmJob(
            "Trainings with different settings, as an array of jobs. Each job saves, requeues itself and resumes.",
            usage("sweep"),
            name="sweep",
            array="0-2%2             # indices of the jobs, two at a time",
            settings=_SWEEP,
        ).script(),
    }


if __name__ == "__main__":
    for name, script in templates().items():
        Path(__file__).with_name(f"{name}.sbatch").write_text(script)
