"""`odc-mpi job`: what its arguments ask for."""

import argparse
from collections.abc import Sequence

from odc_mpi import job

#: Options that are sbatch's own, for sites that ask for them.
CHOICES = ("partition", "account", "gpus-per-node")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the script, or submit it. Local.

    Returns:
        The exit code: sbatch's, if it was asked.

    Raises:
        UserError: The configuration is wrong, or there is no sbatch.
    """
    # Not before here: other commands need neither.
    from odc_mpi.comm.pmi import srun_mpi
    from odc_mpi.train import config as configuration

    config = configuration.load(arguments.config, overrides)
    choices = {name: getattr(arguments, name.replace("-", "_")) for name in CHOICES}
    asked = job.Job(
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        cores_per_rank=arguments.cores_per_rank,
        time=job.check_time(arguments.time),
        mpi=arguments.mpi or srun_mpi(),
        name=job.check_name(arguments.name),
        choices=tuple((name, value) for name, value in choices.items() if value is not None),
        stage=arguments.stage,
    )
    script = job.for_config(asked, arguments.config, tuple(overrides), config.data.path)
    if arguments.submit:
        return job.submit(script)
    print(script, end="")
    return 0
