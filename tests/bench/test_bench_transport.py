"""Tables of `odc-mpi bench transport`, as a terminal shows them."""

from rich.console import Console
from transport_result import result

from odc_mpi.report.bench_report import describe
from odc_mpi.report.page import terminal


def test_the_tables_fit():
    made = result()
    del made["sizes"][0]["all_at_once"]["mpi_allgather"]
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal(describe(made)))
    output = capture.get()
    assert "…" not in output
    assert max(len(line.rstrip()) for line in output.splitlines()) <= 80
    rows = [line.split() for line in output.splitlines()]
    assert next(row for row in rows if row[:1] == ["1M"])[:4] == ["1M", "0.00", "±", "10%"]
    ranks, load = "2 ranks on 1 node, 1 core each, 7 rounds, all ranks at once", "0.5 before, 2.0 after"
    for words in (f"Open MPI 5.0.11, {ranks}", f"load of the node: {load}", "1 us", "mailbox", "accumulate"):
        assert words in output, words
