"""Reports on benchmarks from small results: every picture is there, nothing is needed beside the page."""

import json
import sys

import bench_report
import pytest
from bench_report import KINDS
from report_pages import NASTY, extract_plots, needs_nothing_else, shows
from rich.console import Console
from user_errors import user_error

from odc_mpi.report.page import terminal
from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import simulate


def training_result():
    names = ("fsdp2", "window/lb_micro", "window/lb_mini", "window/dynamic", "ceiling")
    speeds = {name: 1000.0 * (i + 1) for i, name in enumerate(names)} | {"fsdp2/lb_mini": 1600.0}
    fields = {"benchmark": "train", "repeats": 7, "steps": 4, "library": NASTY, "ranks": 2, "threads": 1}
    fields |= {"losses": [8.0, 7.5, None, 7.0], "loss_deviation": dict.fromkeys(speeds, 1e-6), "progress": "off"}
    fields |= {"model_numel": 8_000_000, "reduction": "accumulate", "zero_copy": "on", "load_average": [0.5, 2.0]}
    fields["ratio_to_fsdp2"] = {name: speed / 1000 for name, speed in speeds.items()}
    fields["ratio_to_ceiling"] = {name: speed / 5000 for name, speed in speeds.items()}
    quartiles = {name: [0.9 * speed, 1.1 * speed] for name, speed in speeds.items()}
    return {"tokens_per_s": speeds, "quartiles": quartiles, **fields}


#: Seconds for a unit of 10 GB.
SLOWNESS = {"memcpy": 1.0, "fetch_zero_copy": 1e-6, "fetch_copy": 1.25, "mpi_allgather": 2.0, "push_accumulate": 2.5}
SLOWNESS |= {"push_mailbox": 3.0, "mpi_reduce_scatter": 4.0}


def transport_entry(name, size_bytes):
    time_s = SLOWNESS[name]
    found = {"seconds": dict.fromkeys(("low", "median", "high"), time_s), "gb_per_s": None, "of_memcpy": None}
    if name != "fetch_zero_copy":
        speed = size_bytes / time_s / 1e9
        found |= {"gb_per_s": {"low": speed * 0.9, "median": speed, "high": speed * 1.1}, "of_memcpy": 1 / time_s}
    return found


def transport_result():
    sizes = [
        {"size_bytes": size, "all_at_once": {name: transport_entry(name, size) for name in SLOWNESS}}
        for size in (65536, 1 << 20, 10**10)
    ]
    del sizes[0]["all_at_once"]["mpi_allgather"]
    fields = {"ranks": 2, "nodes": 1, "cores_per_rank": 1, "repeats": 7, "load_average": [0.5, 2.04]}
    return {"benchmark": "transport", "library": f"Open MPI {NASTY}", "sizes": sizes, **fields}


def schedule_result():
    found = simulate(Scenario(ranks=4, num_minibatches=2, speed_variation=0.2))
    output = {"benchmark": "schedule", "library": "MPICH 5.0.2", "nodes": 1, "slept_step_s": 1.0}
    output |= {"load_average": [0.5, 2.0]}
    return json.loads(json.dumps(output | found | {"simulated": found["speedup"]}))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs the program on a result, and returns its exit code."""

    def call(content, *options):
        source = tmp_path / "found.json"
        source.write_text(json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["bench_report.py", str(source), *options])
        return bench_report.main()

    return call


def written(run, tmp_path, content):
    assert run(content) == 0
    return (tmp_path / "found.html").read_text()


def test_a_page_of_schedules(run, tmp_path):
    page = written(run, tmp_path, schedule_result())
    needs_nothing_else(page)
    gantt, speedups = extract_plots(page)
    shows(gantt, "collective/lb_micro", "window/dynamic", "rank 3", "waits for other ranks")
    shows(speedups, "window/local_sort", "floor", "simulated")
    assert "measured on the real runtime" in page and "window/split" not in gantt
    assert run(schedule_result(), "--picture", "gantt") == 0
    assert "<text" in (tmp_path / "found.gantt.svg").read_text()


def test_a_page_of_training(run, tmp_path):
    page = written(run, tmp_path, training_result())
    needs_nothing_else(page)
    speeds, losses = extract_plots(page)
    shows(speeds, "2.50 times as fast as FSDP2 with its better plan (fsdp2/lb_mini)", "4,000", "0.80", "ceiling")
    assert "losses differ by at most 1e-06" in losses
    assert NASTY not in page


def test_a_page_of_transports(run, tmp_path):
    page = written(run, tmp_path, transport_result())
    needs_nothing_else(page)
    (speeds,) = extract_plots(page)
    shows(speeds, "accumulate", "mailbox", "MPI_Allgather", "64K", "A fetch of 9765625K moves 8 GB/s")
    _, values = page.split("<summary>Values</summary>")
    assert "± half the interquartile range" in values.split("</details>")[0] and "<td>" in values
    assert NASTY not in page


def test_tables_of_transports_fit_a_terminal():
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal(KINDS["transport"](transport_result())))
    output = capture.get()
    assert "…" not in output and max(len(line.rstrip()) for line in output.splitlines()) <= 80
    words = ("Open MPI", "2 ranks on 1 node, 1 core each, 7 rounds", "mailbox", "accumulate", "0.5 before, 2.0 after")
    shows(" ".join(output.split()), *words, "1 us", " 1M 0.00 ± 10% ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"benchmark": "baking"}, "schedule or simulate or train or transport, got output of baking"),
        ({"benchmark": "schedule"}, "library"),
        ({"benchmark": "train", "tokens_per_s": 3}, "ratio_to_fsdp2"),
        ({"benchmark": "transport", "sizes": []}, "IndexError"),
    ],
)
def test_other_files_are_a_user_error(run, tmp_path, capsys, content, words):
    user_error(capsys, words=words, main=lambda _: run(content))
    assert {path.name for path in tmp_path.iterdir()} == {"found.json"}, "nothing half-written"
