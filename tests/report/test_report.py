"""Reports from small inputs: every picture is there, nothing is needed beside the page, damage is one line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from declared_metrics import SFT
from report_pages import NASTY, extract_plots, needs_nothing_else, shows
from small_run import write_sequences
from step_metrics import STEP
from user_errors import user_error

from odc_mpi.cli import main as cli
from odc_mpi.observe.metrics import write_declarations
from odc_mpi.observe.trace import NUM_BINS
from odc_mpi.report import report
from odc_mpi.report.page import Figure, ReportPage, html
from odc_mpi.report.plots import Curve, Panel, curves
from odc_mpi.report.run_report import describe
from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import simulate


def step(number, **changes):
    return STEP | {"step": number, "loss": 8.0 - number / 10} | changes


def write_metrics(run, lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def traced(rank):
    spans = {"fetch": [[0.02, 0.05]], "accumulate": [[0.1, 0.12]], "gradients_complete": [[0.35, 0.4]]}
    spans |= {"grad_norm": [[0.41, 0.42]], "parameters_published": [[0.45, 0.5]]}
    microbatches = [[0.01, 0.2, 900], [0.2, 0.3 + rank / 1000, 40]]
    return {"end_s": 0.5, "microbatches": microbatches, "left_out_s": {"fetch": 0.0}, **spans}


@pytest.fixture
def run(tmp_path):
    """A run directory with everything in it, as a run of two ranks leaves it, and names to be careful with."""
    data = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"data:\n  path: {data}\nmodel:\n  path: {NASTY}\n")
    write_metrics(run, map(step, range(1, 6)))
    write_declarations(run, SFT)
    (run / "summary.json").write_text(json.dumps({"world_size": 2, "mpi_library": NASTY, "tokens": 1234567}))
    write_trace(run, 2)
    return run


def write_trace(run, ranks):
    tokens = {"edges": np.linspace(0, 1024, NUM_BINS + 1).tolist(), "counts": [3] * NUM_BINS}
    tokens |= {"first_step": 1, "last_step": 5}
    steps = [{"step": n, "ranks": [traced(rank) for rank in range(ranks)]} for n in (4, 5)]
    content = {"steps": steps, "max_tokens_per_microbatch": 1024, "tokens_per_microbatch": tokens}
    (run / "trace.json").write_text(json.dumps(content))


@cache
def simulated():
    found = simulate(Scenario(ranks=4, num_minibatches=2, speed_variation=0.2))
    return json.loads(json.dumps({"benchmark": "simulate"} | found))


def written(source, content=None, **options):
    if content is not None:
        source.write_text(json.dumps(content))
    return report.write(source, **options).read_text()


def text_of(run):
    """Return the page of a run without its figures, which take long to draw."""
    return html(replace(describe(run), figures=()))


def drawn(output, name):
    """Draw the plot `name` of a report, and return the figure of matplotlib."""
    (figure,) = (figure for figure in output.figures if figure.name == name)
    canvas = matplotlib.figure.Figure(layout="constrained")
    figure.draw(canvas)
    return canvas


def values_at(canvas, x):
    """Return the values at x of the curves in a plot, keyed by the heading of the panel and by the label, if any."""
    found = {}
    for axes in canvas.axes:
        curves = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
        found[axes.get_title()] = {
            label if axes.get_legend() else "": values[x] for label, values in curves.items() if x in values
        }
    return found


def test_a_page_of_a_run(run):
    page = written(run)
    assert (run / "report.html").read_text() == page
    needs_nothing_else(page)
    assert len(extract_plots(page)) == 4
    shows(page, "compute 48%", "fetch and push 10%", "wait 22%", "idle 25.0%", "5 to 30 tokens", "from 7.9 to 7.5 in 5")
    shows(page, "rank 1", "step 4", "step 5", "of steps 1 to 5", "waits for other ranks", "learning rate")
    shows(page, ">900<", ">40<", "at most 1,024", "1,234,567")
    assert NASTY not in page and page.count("&lt;script&gt;alert(") == 3  # lead, summary, configuration
    assert "<details>" in page
    assert 'class="note"' not in page and "held-out" not in page
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "time": "2026-01-01T00:00:00+00:00", "eval_loss": 8.75}) + "\n")
    page = written(run)
    assert 'class="note"' not in page and "on held-out data it stayed at 8.75" in page
    assert "loss, mean over trained tokens" in page


def test_ranks_of_islands_are_grouped(run):
    write_trace(run, 4)
    for name, changes in (("trace.json", {}), ("summary.json", {"world_size": 4, "num_nodes": 2})):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content | {"num_islands": 2} | changes))
    with (run / "config.yaml").open("a") as file:
        file.write("islands:\n  by: 2\n  mode: outer\n")
    lanes = [
        (axes.get_title(), *(label.get_text() for label in axes.get_yticklabels()))
        for axes in drawn(describe(run), "gantt").axes
    ]
    assert lanes == [("island 0", "rank 0", "rank 1"), ("island 1", "rank 2", "rank 3")]
    page = text_of(run)
    assert "2 islands of 2 ranks, outer, on 2 nodes" in page and "num islands" not in page


def test_a_run_that_was_killed(run):
    for name in ("summary.json", "trace.json"):
        (run / name).unlink()
    (run.parent / "data.h5").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    output = describe(run)
    assert [figure.name for figure in output.figures] == ["loss", "time"]
    for word, note in zip(("after 5 steps", "summary.json", "trace.json", "data.path"), output.notes, strict=True):
        assert word in note
    extract_plots(written(run))
    (run / "metrics.jsonl").unlink()
    assert [figure.name for figure in describe(run).figures] == []
    assert "ended before its first step" in text_of(run)


def test_lines_with_other_values_than_numbers_are_skipped(run, capfd):
    good = (run / "metrics.jsonl").read_text()
    for value in ("[]", "NaN", '"text"', "[" * 100_000, "1e308"):
        bad = f'{{"step": {value}, "loss": {value}}}\n'
        (run / "metrics.jsonl").write_text(f"{good}{bad}17\n")
        assert sum("after 5 steps" in note for note in describe(run).notes) == 2
        (run / "metrics.jsonl").write_text(bad)
        assert describe(run)
    extract_plots(written(run))
    assert not capfd.readouterr().err


def test_a_data_set_that_is_damaged_is_not_called_gone(run):
    (run.parent / "data.h5").write_bytes(b"damaged")
    (note,) = describe(run).notes
    assert "one that does not open" in note and "was not found" not in note


def test_a_run_with_rewards(run):
    """Generation is in the lanes; no loss, no lengths of prompts that are not a data set, no empty histogram."""
    rewarded = {"reward": 0.25, "rewards/exact/mean": 0.5, "rewards/short/mean": 0.0, "completions/mean_length": 7.0}
    rewarded |= {"kl": 0.0625, "frac_reward_zero_std": 0.5}
    times = {"generate_s": 0.2, "rollout_wait_s": 0.1}
    lines = [{"step": 0, "eval_reward": 0.1, "eval_exact_match": 0.125}]
    lines += [step(n, loss=-0.01 * n, **rewarded | times | {"reward": n / 8}) for n in range(1, 6)]
    lines[-1] |= {"eval_reward": 0.5, "eval_exact_match": 0.75}
    write_metrics(run, lines)
    trace = json.loads((run / "trace.json").read_text())
    trace["tokens_per_microbatch"]["counts"] = [0] * NUM_BINS
    for each in (local for traced_step in trace["steps"] for local in traced_step["ranks"]):
        each |= {"generate": [[0.3, 0.35]], "save": [[0.42, 0.45]], "evaluate": [[0.45, 0.47]]}
    (run / "trace.json").write_text(json.dumps(trace))
    (run / "config.yaml").write_text(f"data:\n  path: {NASTY}\nrun:\n  objective: grpo\n")
    logged = {"prompt": [{"role": "user", "content": NASTY}], "completion": "c", "reward": 1.0}
    logged |= {"rewards": {"exact": 1.0, "short": None}}
    texts = [json.dumps(logged | {"step": n, "completion": f"of step {n}"}) for n in (1, 3, 5)]
    (run / "completions.jsonl").write_text("\n".join([*texts, '{"step": 6, "pro']))
    output, page = describe(run), written(run)
    assert [figure.name for figure in output.figures] == ["rewards", "gantt", "time"] and not output.notes
    shows(page, "rose from 0.125 to 0.625 in 5 steps", "held-out prompts rose from 12.5% to 75.0%", "generate 10%")
    shows(page, "compute 48%", "fetch and push 10%", "wait 22%", "evaluate 4%", "save 6%")
    shows(page, "of step 1", "of step 5", "user: &lt;script", "grpo")
    values = values_at(drawn(output, "rewards"), 3)
    assert values["reward"] == {"mean reward": 0.375, "exact": 0.5, "short": 0.0}
    assert values["KL divergence from the start"] == {"": 0.0625}
    assert values["truncated completions, equal rewards"] == {"equal rewards": 0.5}
    (legend,) = drawn(output, "gantt").legends
    kinds = [text.get_text() for text in legend.get_texts()]
    assert {"computes", "generates", "evaluates", "saves", "waits for other ranks"} <= set(kinds)
    assert len({tuple(np.ravel(handle.get_facecolor())) for handle in legend.legend_handles}) == len(kinds)
    plain = {kind for kind, handle in zip(kinds, legend.legend_handles, strict=True) if not handle.get_hatch()}
    assert plain == {"computes", "generates"}
    assert "of step 3" not in page and "loss" not in page and NASTY not in page
    extract_plots(page)


def test_completions_of_all_characters(run):
    """Line separators within a text are not ends of lines; what a page cannot contain is escaped."""
    line = json.dumps(step(1, reward=1.0)) + "\n"
    (run / "metrics.jsonl").write_text(line)
    text = "a\u2028b\x85c\x1cd\x00e\x0cf\ud800g\U0001f600\r\n\t<b>"
    logged = {"step": 1, "prompt": "p", "reward": 1.0, "rewards": {}}
    raw = (json.dumps(logged | {"completion": text.replace("\ud800", "")}, ensure_ascii=False) + "\n").encode()
    escaped = (json.dumps(logged | {"completion": text}) + "\n").encode()
    (run / "completions.jsonl").write_bytes(raw + escaped + raw.replace(b"c", b"\xff"))
    page = written(run)
    shown = "a\u2028b\\x85c\\x1cd\\x00e\\x0cf\\ud800g\U0001f600\\x0d\n\t&lt;b&gt;"
    assert shown in page and shown.replace("\\ud800", "") in page
    extract_plots(page)


@pytest.mark.parametrize(
    ("objective", "title", "names"),
    [
        ("dpo", ">dpo", ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")),
        ("reward", ">reward", ("margin", "accuracy", "mean_reward", "max_reward")),
    ],
)
def test_a_run_on_preferences(run, objective, title, names):
    def values(n, prefix=""):
        return {prefix + name: value for name, value in zip(names, (n / 8, 0.5 + n / 16, -9, -9.5 - n), strict=True)}

    lines = [step(n, loss=0.7 - n / 10, **values(n)) for n in range(1, 6)]
    lines[-1] |= {"eval_loss": 0.375, **values(6, "eval_")}
    lines = [{"step": 0, "eval_loss": 0.6875, **values(0, "eval_")}, *lines]
    write_metrics(run, lines)
    (run / "config.yaml").write_text(f"run:\n  objective: {objective}\n")
    output = describe(run)
    shows(text_of(run), title)
    shows(str(output.figures), "fell from 0.6875 to 0.375", "accuracy rose from 50.0% to 87.5%")
    canvas = drawn(output, "loss")
    panels = values_at(canvas, 5)
    assert any("mean over pairs" in axes.get_title() + axes.get_ylabel() for axes in canvas.axes)
    assert panels["reward of the chosen minus the rejected answer"] == {"training": 0.625, "held-out": 0.75}
    assert panels["pairs whose chosen answer has the higher reward"] == {"training": 0.8125, "held-out": 0.875}
    answers = {"chosen": -9, "rejected": -14.5} if objective == "dpo" else None
    assert panels.get("log-probability of an answer") == answers


def test_key_figures_are_tiles(run):
    summary = {"world_size": 2, "device": "cpu", "num_parameters": 2_000_000, "num_trained_parameters": 20_000}
    summary |= {"loss_first": 8.5, "loss_last": 7.5, "eval_loss_start": 8.75, "eval_loss": 8.1}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.yaml").write_text("model:\n  path: models/Small\n")
    tiles = re.findall(r"<div><span>([^<]*)</span><b>([^<]*)</b><span>([^<]*)</span></div>", text_of(run))
    assert tiles == [
        ("model", "Small", "2.0 M parameters, 1% trained"),
        ("ranks", "2", "on 1 node, cpu"),
        ("tokens per second", "2,000", "5 steps in 0:00:02"),
        ("ranks idle", "25.0%", "of the time, waiting at step ends"),
        ("held-out loss", "8.75 → 8.1", "first to last"),
    ]


def test_of_many_steps_and_ranks_some_are_shown(run):
    lines = [step(n, **({"loss": None, "skipped": True} if n % 50 == 0 else {})) for n in range(1, 301)]
    write_metrics(run, lines)
    write_trace(run, 100)
    page = written(run)
    assert "6 steps were skipped" in page and "means over 4 steps" in page
    assert "nan" not in "".join(extract_plots(page)).lower()
    shown = {int(rank) for rank in re.findall(r">rank (\d+)<", page)}
    assert len(shown) == 32 and {0, 99} <= shown  # the least and the most busy
    assert "32 of 100 ranks are shown" in page


def test_a_page_of_schedules(tmp_path):
    page = written(tmp_path / "found.json", simulated())
    needs_nothing_else(page)
    gantt, speedups = extract_plots(page)
    shows(gantt, "collective/lb_micro", "window/dynamic", "rank 3", "waits for other ranks")
    shows(speedups, "window/local_sort", "floor")
    assert "Simulated by odc-mpi simulate, not measured" in page and "window/split" not in gantt
    assert (tmp_path / "found.html").exists()


def test_islands_are_listed_and_split_sequences_are_drawn_where_they_gain(tmp_path):
    scenario = Scenario(ranks=4, per_rank=1, num_minibatches=1, num_islands=2, link_gb_per_s=1e5, sync_every=4)
    page = written(tmp_path / "a.json", {"benchmark": "simulate", **simulate(scenario)})
    shows(page, "islands/dynamic", "outer/dynamic", "window/split", ", split ")
    assert "measured on the real runtime" not in page


def test_pictures_are_text_and_the_same_each_time(tmp_path):
    content = simulated()
    first, second = (written(tmp_path / "found.json", content, plot_name="gantt") for _ in range(2))
    assert first == second
    assert "<text" in first and "collective/lb_micro" in first
    assert (tmp_path / "found.gantt.svg").exists()
    assert "#ffffff" in first and "var(" not in first, "alone, a picture has its own background"
    page = written(tmp_path / "found.json")
    assert "fill: var(--ink)" in page and "stroke: var(--muted)" in page and "#0072b2" not in extract_plots(page)[0]
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    rows = [[Panel("", [Curve("", [1, 2], [3.0, 4.0], {})])]]
    figure = Figure("p", 'a "b"', partial(curves, rows=rows, xlabel="step"))
    page = html(ReportPage("t", [], figures=[figure, figure._replace(name="q")]))
    assert 'aria-label="a &quot;b&quot;"' in page
    assert len(extract_plots(page)) == 2


def test_numbers_at_axes_differ_and_any_name_is_drawn_as_it_is():
    """Names of reward functions: no formula, no warning about glyphs; not left out for its first character."""
    rows = [[Panel(NASTY, [Curve("$a_b$ 報酬", [1, 2], [0.0, 0.005], {})], ".0%")]]
    svg = Figure("p", "", partial(curves, rows=rows, xlabel="step")).svg()
    labels = re.findall(r">([\d.]+%)<", svg)
    assert len(labels) == len(set(labels)) > 2
    assert ">$a_b$ 報酬<" in svg and "&lt;script&gt;" in svg and NASTY not in svg


def test_drawing_prints_nothing_if_the_home_cannot_be_written(tmp_path):
    """Neither a missing cache folder nor the first list of fonts is reported. There is no pyplot, and no backend."""
    (tmp_path / "found.json").write_text(json.dumps(simulated()))
    program = f"""if True:
        import sys
        from odc_mpi.report import report
        report.write(report.Path({str(tmp_path / "found.json")!r}))
        assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
    """
    hidden = ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": "/dev/null/home", "MPLBACKEND": "module://absent"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "found.html").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("found.json", None, "No such file"),
        ("found.json", "", "JSON"),
        ("found.json", "[1, 2]", "got other JSON"),
        ("found.json", '{"loss": 1}', "got other JSON"),
        ("found.json", '{"benchmark": "baking"}', "output of simulate, got output of baking"),
        ("found.json", '{"benchmark": "simulate"}', "scenario"),
        ("found.json", "\x00\x01\xff", "JSON"),
        ("run/trace.json", "{", ""),
        ("run/trace.json", '{"steps": []}', ""),
        ("run/trace.json", '{"steps": [{"step": 1, "ranks": [{"end_s": 1}]}]}', ""),
        ("run/summary.json", "[]", ""),
        ("run/config.yaml", "a: b: c", ""),
        ("run/metrics.jsonl", '{"step": 1}\n', ""),
    ],
)
def test_other_and_damaged_files_are_a_user_error(run, tmp_path, capsys, name, content, words):
    source = run if "/" in name else tmp_path / name
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    before = set(tmp_path.rglob("*"))
    line = user_error(capsys, "report", source)
    assert words in line and str(source) in line
    assert set(tmp_path.rglob("*")) == before, "nothing half-written"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (".", "run directory"),
        ("x" * 300, "x" * 300),
        ("run --picture gant", "loss, gantt, time, lengths"),
        ("run --picture gantt --out a.png", "ends in .svg"),
        ("run --out a.svg", "ends in .html"),
        ("run --out run/metrics.jsonl", "to replace"),
        ("empty --out nowhere/a.html", "--out"),
        ("empty --out taken", "--out"),
    ],
)
def test_other_user_errors(run, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    if arguments.startswith("empty"):
        (run / "trace.json").unlink()
        (run / "metrics.jsonl").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    user_error(capsys, "report", *arguments.replace("empty", "run").split(), words=words)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}, "nothing half-written"


def test_the_command_prints_what_it_wrote(run, tmp_path, capsys):
    (run / "metrics.jsonl").unlink()
    assert cli.main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}\n"
    assert not (run / "report.html").exists()
    assert Path(tmp_path / "a.html").stat().st_mode & 0o044, "others may read it as any file"
