"""A benchmark's object as a terminal shows it."""

from rich.console import Console

from odc_mpi.report.bench_report import describe
from odc_mpi.report.terminal import render


def render_report(result, width=80):
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(describe(result)))
    return capture.get()
