"""`odc-mpi train`: initialize the ranks and train a model. The settings are defined in `training.settings`."""

import argparse
import importlib
from typing import TYPE_CHECKING

from odc_mpi.cli.options import as_path, positive_int
from odc_mpi.errors import UserError
from odc_mpi.runtime.ranks import gc_paused, mpi_startup, run_on_all_ranks
from odc_mpi.runtime.start.launch import launched_rank

if TYPE_CHECKING:
    from odc_mpi.training.settings import Config

_USAGE = """\
usage: odc-mpi train [--config FILE] [--dry-run [--ranks N]] [--SECTION.KEY VALUE ...]

Settings on the command line override those in FILE, which is YAML. Lists take commas or several
words; a setting that is true or false may stand alone.

  odc-mpi train --help SECTION    one section
  odc-mpi train --help names      names of other libraries that are accepted, too
  odc-mpi config FILE             all values, and where they come from
  odc-mpi train --dry-run ...     memory per rank, steps and the first batch, without training

"""
HELP = "train a model; run under mpiexec or srun for several ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi train` other than the settings."""
    parser.usage = "odc-mpi train [--config FILE] [--dry-run [--ranks N]] [--SECTION.KEY VALUE ...]"
    parser.description = "Settings on the command line override those in the file."
    parser.add_argument("--config", type=as_path, metavar="FILE", help="YAML file with the settings")
    parser.add_argument("--dry-run", action="store_true", help="print memory, steps and first batch; write no file")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="number of ranks of a dry run on one process")
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION", help="show all settings and exit")


def run(arguments: argparse.Namespace) -> int:
    """Train a model and return the exit code. Also handles `--help` and `--dry-run`. Collective."""
    if arguments.ranks and not arguments.dry_run:
        raise UserError("--ranks: only for --dry-run; training runs on all ranks of mpiexec -n N odc-mpi train")
    if arguments.help is not None:
        from odc_mpi.training import settings

        print(_USAGE + settings.help_text(arguments.help))
        return 0
    from odc_mpi.observe.rank_log import RankLog
    from odc_mpi.runtime.start.start_times import StartTimes, process_start
    from odc_mpi.training.stop import StopRequest

    start_times = StartTimes(process_start())

    # Entered before the imports: a scheduler may stop a run that has just started, and imports may cause warnings.
    with StopRequest() as stop, RankLog(launched_rank()) as log:
        loaded = _load(arguments)
        # Imported late: torch and transformers need seconds, and errors in settings are found earlier. MPI starts with
        # the last import. If an import failed after MPI started, the other ranks would wait for this rank.
        if not isinstance(loaded, UserError):
            with gc_paused():
                importlib.import_module("odc_mpi.models.build")
        start_times.end("imports")
        with mpi_startup():
            from odc_mpi.runtime.world import World

        # With invalid settings the ranks start only to raise the error together.
        world = World() if isinstance(loaded, UserError) else World(timeout_s=loaded.comm.timeout_s)
        start_times.end("mpi")

        def start() -> None:
            config = world.run_on_all(lambda: _unwrap(loaded))
            if arguments.dry_run:
                from odc_mpi.training.start.dry_run import dry_run

                return dry_run(config, world, arguments.ranks)
            from odc_mpi.training.train import train

            world.run_on_all(lambda: log.open(config.run.log_dir, world))
            train(config, world, stop, start_times)
            return None

        return run_on_all_ranks(world, start)


def _load(arguments: argparse.Namespace) -> "Config | UserError":
    """Return the settings, or a `UserError` for all ranks to raise. The file may be a pipe, so it is read only once."""
    from odc_mpi.training import settings

    try:
        return settings.load(arguments.config, arguments.overrides)
    except UserError as error:
        return error


def _unwrap(loaded: "Config | UserError") -> "Config":
    if isinstance(loaded, UserError):
        raise loaded
    return loaded
