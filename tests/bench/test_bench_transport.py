import pytest
from render_report import render_report
from transport_result import SLOWNESS, result

from odc_mpi.bench.transport import evaluate_goals


def verdicts(**slowness):
    goals = result([1 << 20], SLOWNESS | slowness)["goals"]
    return {goal["goal"]: goal["reached"] for goal in goals}


@pytest.mark.parametrize(
    ("goal", "slowness"),
    [
        ("fetch_of_memcpy", {"fetch_copy": 1.67}),
        ("fetch_of_gloo", {"gloo_all_gather": 12.4}),
        ("accumulate_of_memcpy", {"push_accumulate": 2.51, "gloo_reduce_scatter": 30.0}),
        ("accumulate_of_gloo", {"gloo_reduce_scatter": 24.9}),
        ("zero_copy_us", {"fetch_zero_copy": 20e-6}),
    ],
)
def test_a_goal_that_is_just_missed(goal, slowness):
    reached = verdicts(**{"gloo_all_gather": 20.0, "gloo_reduce_scatter": 25.0} | slowness)
    assert [name for name, is_reached in reached.items() if not is_reached] == [goal]


def test_what_was_not_measured_has_no_verdict():
    """Without gloo, and with zero-copy fetches between nodes."""
    made = result([1 << 20])
    for entry in made["sizes"][0]["all_at_once"].values():
        entry["of_gloo"] = None
    assert [goal["goal"] for goal in evaluate_goals(made["sizes"][0])] == [
        "fetch_of_memcpy",
        "accumulate_of_memcpy",
        "zero_copy_us",
    ]


def test_the_tables_fit():
    output = render_report(result())
    assert "…" not in output
    assert max(len(line.rstrip()) for line in output.splitlines()) <= 80
    rows = [line.split() for line in output.splitlines()]
    assert next(row for row in rows if row[:1] == ["1M"])[:4] == ["1M", "0.00", "±", "10%"]
    head = "Open MPI 5.0.11, 2 ranks on 1 node, 1 core each, 7 rounds, all ranks at once"
    cells = ("20 ms; 6.02", "0.12 ms; 8.10", "900 ms; 13.33", "1 us", "mailbox", "accumulate")
    missing = [words for words in (head, "load of the node: 0.5 before, 2.0 after", *cells) if words not in output]
    assert missing == []
    assert ["fetch", "of", "memcpy", "fetch", "copy", "64K", "0.8", "0.6", "yes"] in rows
    assert ["accumulate", "of", "gloo", "push", "accumulate", "1M", "8", "10", "no"] in rows


def test_tables_of_one_rank_or_several_nodes():
    made = result()
    made |= {"ranks": 1, "goals": [], "left_out": {"gloo_all_gather": "for ranks of one node only"}}
    for size in made["sizes"]:
        size["one_alone"] = {}
        del size["all_at_once"]["gloo_all_gather"]
    output = render_report(made)
    assert "left out: gloo_all_gather, for ranks of one node only" in output
    assert "Only rank 0" not in output
    assert "Goals" not in output
