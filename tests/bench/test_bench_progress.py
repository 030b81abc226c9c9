"""Goals and tables of `odc-mpi bench progress`, from figures made up."""

import pytest
from progress_result import LEFT_OUT, get, polite, push, result
from shown import shown

from odc_mpi.bench.progress.benchmark import _async_progress, judge


def verdicts(read, politeness, pushed):
    return {(goal["goal"], goal["variant"]): goal["reached"] for goal in judge([read], politeness, [pushed])}


GOALS = [
    *(("get_delay_s", kind) for kind in ("large_products", "small_operations", "python")),
    *(("slow_down", name) for name in ("accumulate", "mailbox")),
    ("mailbox_of_put", "mailbox"),
]


def test_goals_that_are_just_reached():
    assert verdicts(get(idle=0.0, python=5e-3), polite(mailbox=0.05), push(of_put=0.25)) == dict.fromkeys(GOALS, True)


@pytest.mark.parametrize(
    ("missed", "read", "politeness", "pushed"),
    [
        (GOALS[0], get(large_products=6.01e-3), polite(), push()),
        (GOALS[1], get(small_operations=6.01e-3), polite(), push()),
        (GOALS[2], get(python=6.01e-3), polite(), push()),
        (GOALS[3], get(), polite(accumulate=0.0501), push()),
        (GOALS[4], get(), polite(mailbox=0.0501), push()),
        (GOALS[5], get(), polite(), push(of_put=0.249)),
    ],
)
def test_a_goal_that_is_just_missed(missed, read, politeness, pushed):
    assert [goal for goal, reached in verdicts(read, politeness, pushed).items() if not reached] == [missed]


def test_every_goal_states_the_figure_and_what_was_expected():
    first, *_, last = judge([get()], polite(), [push()])
    assert first == {
        "goal": "get_delay_s",
        "size_bytes": 1 << 20,
        "variant": "large_products",
        "figure": pytest.approx(1e-3),
        "expected": 5e-3,
        "reached": True,
    }
    assert (last["goal"], last["size_bytes"], last["figure"], last["expected"]) == (
        "mailbox_of_put",
        8 << 20,
        0.5,
        0.25,
    )


def test_what_was_left_out_has_no_verdict():
    pushed = push()
    del pushed["variants"]["mailbox"]
    without_put = push(of_put=None)
    names = {goal["goal"] for goal in judge([get()], polite(), [pushed, without_put])}
    assert names == {"get_delay_s", "slow_down"}


@pytest.mark.parametrize(
    ("library", "value", "on"),
    [
        ("MPICH 5.0.2", "1", True),
        ("MPICH 5.0.2", "YES", True),
        ("MPICH 5.0.2", "0", False),
        ("MPICH 5.0.2", "", False),
        ("Open MPI 5.0.11", "1", False),
    ],
)
def test_whether_mpich_has_a_thread_of_its_own(library, value, on):
    assert _async_progress(library, {"MPIR_CVAR_ASYNC_PROGRESS": value}) is on
    assert _async_progress(library, {}) is False


def test_the_tables_fit():
    told = shown(result())
    assert "…" not in told
    for words in (
        "Open MPI 5.0.11, 2 ranks on 2 nodes, 9 rounds; rank 0 turns to rank 1",
        "cores that the ranks keep to: 0, 1",
        "load of the node: 0.5 before, 2.0 after",
        f"left out: accumulate of 32M, {LEFT_OUT}",
        "0.84 ± 10%",
        "4 (8)",
    ):
        assert words in told, words
    rows = [line.split() for line in told.splitlines()]
    assert ["no", "thread", "0.2500", "[0.2250,", "0.2750]"] in rows
    assert ["thread", "of", "accumulate", "0.2580", "[0.2322,", "0.2838]", "+3.2%", "[+2.9%,", "+3.5%]"] in rows
    assert ["slow", "down", "mailbox", "0.06", "0.05", "no"] in rows
    assert ["mailbox", "of", "put", "mailbox", "8M", "0.5", "0.25", "yes"] in rows


def test_mpichs_own_thread_is_told():
    rows = [line.split() for line in shown(result() | {"mpich_async_progress": True}).splitlines()]
    assert ["MPICH's", "own", "thread", "0.2500", "[0.2250,", "0.2750]"] in rows
