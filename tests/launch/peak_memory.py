"""The memory of a training run in one process: estimated by a dry run, and the measured peak."""

import re
import subprocess
import sys

from mpi_launch import environment

PROGRAM = """if True:
    import sys
    from odc_mpi.cli.main import main
    from odc_mpi.runtime.memory import peak_resident_bytes
    assert main(["train", "--config", *sys.argv[1:]]) == 0
    print("peak", peak_resident_bytes())
"""


def estimated_and_measured(config):
    """Return the total of `--dry-run` and the peak of the run, in bytes. Each has a process of its own."""
    estimated, measured = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, config, *words],
            cwd=config.parent,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in (["--dry-run"], [])
    )
    total = int(re.search(r"total +([\d,]+) MiB", estimated)[1].replace(",", "")) << 20
    return total, int(measured.rsplit("peak ", 1)[1])
