from render_report import render_report
from transport_result import result


def test_the_tables_fit():
    output = render_report(result())
    assert "…" not in output
    assert max(len(line.rstrip()) for line in output.splitlines()) <= 80
    rows = [line.split() for line in output.splitlines()]
    assert next(row for row in rows if row[:1] == ["1M"])[:4] == ["1M", "0.00", "±", "10%"]
    for words in (
        "Open MPI 5.0.11, 2 ranks on 1 node, 1 core each, 7 rounds, all ranks at once",
        "load of the node: 0.5 before, 2.0 after",
    ):
        assert words in output
    for cell in (
        "1 us",
        "mailbox",
        "accumulate",
    ):
        assert cell in output, cell


def test_tables_of_one_rank_or_several_nodes():
    made = result()
    made |= {"ranks": 1, "left_out": {"gloo_all_gather": "for ranks of one node only"}}
    for size in made["sizes"]:
        del size["all_at_once"]["gloo_all_gather"]
    output = render_report(made)
    assert "left out: gloo_all_gather, for ranks of one node only" in output
