"""`odc-mpi bench progress` on two hosts, where a progress thread is what serves."""

import json

from two_hosts import launch

# On a machine with more to do than cores a push of any size may take seconds: none is to be left out here.
PATIENT = ("--budget-s", 60, "--timeout-s", 60)
SMALL = ("--sizes", "64,100K", "--push-sizes", "100K", "--repeats", 1, "--json", *PATIENT)


def test_rank_0_turns_to_the_other_host():
    done = launch(1, "-m", "odc_mpi", "bench", "progress", *SMALL, timeout_s=110)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["nodes"], result["target"], result["other_node"]) == (2, 1, True)
    for size in result["get"]:
        for kind, entry in size["kinds"].items():
            assert (entry["computed_s"] > 0) == (kind != "idle")
    for size in result["reduction"]:
        assert set(size["variants"]) == {"put", "accumulate", "mailbox"}
        assert all(entry["gb_per_s"]["median"] > 0 for entry in size["variants"].values())
    assert len(result["goals"]) == 9
