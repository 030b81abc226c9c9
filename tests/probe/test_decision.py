"""Decisions from faked reports: every rule, every setting, every gap."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from user_errors import refused

from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.probe.decision import decide, require_correct_data
from odc_mpi.probe.device_decision import RUN_DOCTOR
from odc_mpi.probe.report import WRONG, OperationResult, Peer, Peers, ProbeReport, SharedMemory

FAST = OperationResult(one_sided=True, idle_s=2e-6, busy_s=2e-6, gb_per_s=10.0)
WAITS = OperationResult(one_sided=False, idle_s=2e-4, busy_s=3.1, gb_per_s=1.0)
NO_ANSWER = OperationResult()
NODE = Peer(FAST, FAST, FAST, FAST)
#: As MPICH over TCP: all wait, sums as fast as anything.
TCP = Peer(WAITS, WAITS, WAITS, WAITS)


def report(same_node=NODE, other_node=None, **changes):
    return ProbeReport(
        library="MPICH 5.0.2",
        thread_level="MPI_THREAD_MULTIPLE",
        nodes=1 if other_node is None else 2,
        ranks_per_node=((2 if same_node else 1),) * (2 if other_node else 1),
        shm_bytes=1 << 30,
        shared_memory=SharedMemory(readable=True, contiguous=True, load_s=3e-7),
        peers=Peers(same_node, other_node),
        **changes,
    )


def choices(decision):
    return tuple(made["choice"] for name, made in decision.to_dict().items() if name != "node_cache")


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (report(), ("accumulate", "off")),
        (report(None), ("mailbox", "off")),
        (report(None, TCP), ("accumulate", "thread")),
        (report(other_node=replace(TCP, get=FAST)), ("accumulate", "thread")),
        (report(other_node=replace(NODE, put=WAITS)), ("accumulate", "off")),
        (report(other_node=replace(NODE, fetch_and_op=NO_ANSWER)), ("accumulate", "thread")),
        (report(replace(NODE, fetch_and_op=WAITS)), ("accumulate", "off")),
    ],
    ids=[
        *("one node", "one rank", "a rank per node", "only Get", "only Put waits"),
        *("tickets gave no answer", "tickets on a node"),
    ],
)
def test_what_is_used(found, wanted):
    assert choices(decide(found)) == ("allocate_shared", "on", *wanted)


def test_a_ticket_that_waits_is_the_reason_for_the_thread():
    made = decide(report(other_node=TCP))
    assert made.progress.reason == "Get from a peer on the other node waits for the target: 3.1 s against 0.2 ms idle"
    assert made.to_dict()["progress"] == {"choice": "thread", "reason": made.progress.reason}
    assert made.one_line() == "zero-copy on, gradients by MPI_Accumulate, progress thread", "reasons are the doctor's"
    made = decide(report(other_node=replace(NODE, fetch_and_op=WAITS))).progress
    assert made.reason == "Fetch_and_op to a peer on the other node waits for the target: 3.1 s against 0.2 ms idle"
    assert decide(report(other_node=NODE)).progress.reason == (
        "Get, Accumulate and Fetch_and_op are one-sided towards all peers"
    )
    assert decide(report()).progress.reason == "Get and Accumulate are one-sided towards all peers"


@pytest.mark.parametrize(("gb_per_s", "wanted"), [(0.25, "accumulate"), (0.24, "mailbox"), (0.0, "mailbox")])
def test_accumulate_has_a_quarter_of_puts_bandwidth(gb_per_s, wanted):
    made = decide(report(other_node=replace(TCP, accumulate=replace(WAITS, gb_per_s=gb_per_s)))).reduction
    assert made.value == wanted
    assert f"{gb_per_s:.2g} GB/s, Put 1" in made.reason


def test_a_mailbox_needs_a_thread_even_if_puts_and_gets_are_one_sided():
    full = "a full mailbox delays other ranks until its owner adds the gradients"
    slow_sum = OperationResult(one_sided=False, idle_s=1e-3, busy_s=1.0, gb_per_s=0.01)
    one_sided_puts = replace(NODE, accumulate=slow_sum)
    made = decide(report(other_node=one_sided_puts))
    assert choices(made)[2:] == ("mailbox", "thread") and made.progress.reason == full
    assert choices(decide(report(other_node=replace(one_sided_puts, put=WAITS))))[2:] == ("mailbox", "thread")
    without = decide(report(), CommConfig(reduction="mailbox", progress="off"))
    assert f"no progress thread (set by comm.progress; warning: {full})" in without.one_line()
    serialized = replace(report(), thread_level="MPI_THREAD_SERIALIZED")
    line = decide(serialized, CommConfig(reduction="mailbox")).one_line()
    assert f"(warning: {full}, but a thread requires MPI_THREAD_MULTIPLE, got MPI_THREAD_SERIALIZED)" in line
    # Accumulate, if set all the same, needs a thread that makes progress.
    wanted = decide(report(other_node=one_sided_puts), CommConfig(reduction="accumulate"))
    assert choices(wanted)[2:] == ("accumulate", "thread")


def test_no_answer_counts_against_an_operation():
    assert choices(decide(report(replace(NODE, get=NO_ANSWER)))) == ("allocate_shared", "on", "accumulate", "thread")
    assert choices(decide(report(replace(NODE, accumulate=NO_ANSWER))))[2:] == ("mailbox", "thread")
    neither = decide(report(replace(NODE, accumulate=NO_ANSWER, put=NO_ANSWER)))
    assert choices(neither)[2:] == ("accumulate", "thread")
    assert "no answer" in neither.reduction.reason
    unsure = decide(report(replace(NODE, accumulate=replace(FAST, one_sided=None))))
    assert choices(unsure)[2:] == ("accumulate", "thread")
    assert choices(decide(ProbeReport())) == ("allocate", "off", "mailbox", "off")


def test_a_peer_that_gave_no_answer_at_all_is_still_there():
    """As when a library crashes in the first operation that it is asked for."""
    made = decide(replace(report(None, NODE), peers=Peers()))
    assert choices(made)[2:] == ("accumulate", "thread")
    assert made.reduction.reason == "Accumulate to a peer on the other node gave no answer, nor did Put"
    assert made.progress.reason == "Get from a peer on the other node gave no answer"


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (SharedMemory(), "no answer"),
        (SharedMemory(readable=False, contiguous=True), "read"),
        (SharedMemory(readable=True, contiguous=False), "not contiguous"),
    ],
)
def test_without_shared_memory_there_is_no_zero_copy(shared, words):
    made = decide(replace(report(), shared_memory=shared))
    assert choices(made)[:2] == ("allocate", "off")
    assert words in made.zero_copy.reason and words in made.window.reason


@pytest.mark.parametrize(
    ("found", "settings", "wanted"),
    [
        (report(other_node=TCP), {}, "on"),
        (report(other_node=TCP), {"node_cache": "off"}, "off: set by comm.node_cache"),
        (report(other_node=TCP), {"zero_copy": "off"}, "off: zero-copy is off: set by comm.zero_copy"),
        (report(), {}, "off: all ranks are on one node"),
        (report(None, TCP), {}, "off: each node has one rank"),
    ],
    ids=["shares", "set", "copies", "one node", "one rank per node"],
)
def test_a_node_shares_what_it_fetches_if_it_has_several_ranks_that_read_its_memory(found, settings, wanted):
    made = decide(found, CommConfig(**settings))
    assert f"{made.node_cache.value}: {made.node_cache.reason}".startswith(wanted)
    assert made.comm.node_cache == ("auto" if wanted == "on" else "off")


def test_settings_win():
    made = decide(report(other_node=TCP), CommConfig(zero_copy="off", reduction="mailbox", progress="off"))
    assert choices(made) == ("allocate", "off", "mailbox", "off")
    assert made.zero_copy.reason == "set by comm.zero_copy"
    assert made.reduction.reason == "set by comm.reduction"
    assert decide(report(), CommConfig(progress="off")).progress.reason == "set by comm.progress"
    assert decide(report(), CommConfig(progress="thread")).progress.value == "thread"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"zero_copy": "on"}, "auto or off"),
        ({"reduction": "sum"}, "mailbox"),
        ({"progress": "core"}, "thread"),
        ({"window_device": "gpu"}, "auto or cuda or cpu"),
        ({"mailbox_bytes": 0}, "a size such as 512M, 1 or more"),
        ({"gradient_cache_bytes": 0.5}, "auto or a size"),
        ({"parameter_cache_bytes": -1}, "auto or a size"),
        ({"prefetch": -1}, "an integer, 0 or more"),
    ],
)
def test_unknown_settings(setting, words):
    (name, value), *_ = setting.items()
    refused(f"comm.{name}: expected ...{words}..., got {json.dumps(value)}", CommConfig, **setting)


def test_sizes_may_have_units():
    assert CommConfig(mailbox_bytes="64M", parameter_cache_bytes="1k") == CommConfig(parameter_cache_bytes=1024)


def test_a_thread_needs_to_be_allowed():
    single = replace(report(other_node=TCP), thread_level="MPI_THREAD_SERIALIZED")
    made = decide(single).progress
    assert made.value == "off"
    assert "warning" in made.reason and "MPI_THREAD_MULTIPLE" in made.reason and "SERIALIZED" in made.reason
    refused("comm.progress: thread requires MPI_THREAD_MULTIPLE", decide, single, CommConfig(progress="thread"))


def test_a_report_travels_as_json():
    found = report(other_node=replace(TCP, get=NO_ANSWER)).with_problem("other_node get", "no answer within 12 s: busy")
    assert ProbeReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert ProbeReport.from_dict(json.loads(json.dumps(ProbeReport().to_dict()))) == ProbeReport()


@pytest.mark.parametrize(
    ("name", "reduction", "refused"),
    [
        ("get", "auto", True),
        ("accumulate", "auto", False),
        ("accumulate", "accumulate", True),
        ("put", "auto", False),
        ("put", "mailbox", True),
        ("fetch_and_op", "auto", False),
    ],
)
def test_what_delivers_wrong_data_is_not_used(name, reduction, refused):
    found = report(other_node=replace(NODE, **{name: NO_ANSWER})).with_problem(f"other_node {name}", WRONG)
    decision = decide(found, CommConfig(reduction=reduction))
    words = f"{name.title()} with a peer on the other node delivers wrong data under MPICH 5.0.2"
    with pytest.raises(UserError, match=words) if refused else nullcontext():
        require_correct_data(found, decision)


@pytest.mark.parametrize("tickets", [False, True])
def test_no_rank_draws_from_wrong_counters(tickets):
    found = report().with_problem("same_node fetch_and_op", WRONG)
    refused = pytest.raises(UserError, match=r"Fetch_and_op with a peer on the same .* set data\.balance to lb_mini")
    with refused if tickets else nullcontext():
        require_correct_data(found, decide(found), tickets=tickets)


def test_complete_settings_need_no_probe():
    complete = {"zero_copy": "off", "reduction": "mailbox", "progress": "off"}
    assert CommConfig(**complete).is_complete
    assert not any(CommConfig(**complete | {name: "auto"}).is_complete for name in complete)


def test_gpus_have_windows_that_are_mapped_unless_their_memory_or_a_setting_is_against_it():
    for settings in (CommConfig(), CommConfig(window_device="cuda"), CommConfig(reduction="mailbox")):
        made = decide(report(other_node=None), settings, on_device=True, mapping_error="")
        assert made.maps_devices and choices(made) == ("map", "off", "mailbox", "thread", "cuda")
    full = "the shards of rank 1 need 9G"
    little = decide(report(other_node=None), on_device=True, mapping_error="", device_objection=full)
    assert (little.window_device.value, little.window_device.reason) == ("cpu", full)
    for error, text in (("no CuPy", f"{RUN_DOCTOR}; no CuPy"), (None, RUN_DOCTOR)):
        assert decide(report(), on_device=True, mapping_error=error).window_device.reason.endswith(text)
    single_rank = decide(report(None, None), on_device=True, device_objection=full)
    assert single_rank.window_device.value == "cpu"
    forced = decide(report(), CommConfig(window_device="cuda"), on_device=True, mapping_error="", device_objection=full)
    assert forced.maps_devices
    for settings in (CommConfig(window_device="cpu"), CommConfig(reduction="accumulate")):
        assert not decide(report(), settings, on_device=True, mapping_error="").maps_devices
