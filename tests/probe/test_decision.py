"""Decisions from faked reports: every rule, every setting, every gap."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from user_errors import refused, says

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


FULL = "a full mailbox delays other ranks until its owner adds the gradients"


def report(same_node=NODE, other_node=None, **changes):
    return ProbeReport(
        library="MPICH 5.0.2",
        thread_level="MPI_THREAD_MULTIPLE",
        nodes=1 if other_node is None else 2,
        ranks_per_node=((2 if same_node else 1),) * (2 if other_node else 1),
        shm_bytes=1 << 30,
        shared_memory=SharedMemory(readable=True, contiguous=True),
        peers=Peers(same_node, other_node),
        **changes,
    )


def choices(decision):
    return tuple(made["choice"] for name, made in decision.to_dict().items() if name != "node_cache")


SLOW_SUM = replace(NODE, accumulate=OperationResult(one_sided=False, idle_s=1e-3, busy_s=1.0, gb_per_s=0.01))
SINGLE = replace(report(other_node=TCP), thread_level="MPI_THREAD_SERIALIZED")
ON = "allocate_shared on"


@pytest.mark.parametrize(
    ("found", "settings", "wanted", "reasons"),
    [
        # One node, one rank, a rank per node.
        (report(), {}, f"{ON} accumulate off", {"progress": "Get and Accumulate are one-sided towards all"}),
        (report(None), {}, f"{ON} mailbox off", {}),
        (report(None, TCP), {}, f"{ON} accumulate thread", {}),
        # A ticket that waits is a reason for the thread.
        (report(other_node=TCP), {}, f"{ON} accumulate thread", {"progress": "Get...other node...3.1 s against 0.2"}),
        (report(other_node=replace(TCP, get=FAST)), {}, f"{ON} accumulate thread", {}),
        (report(other_node=NODE), {}, f"{ON} accumulate off", {"progress": "Get, Accumulate and Fetch_and_op are"}),
        (report(other_node=replace(NODE, put=WAITS)), {}, f"{ON} accumulate off", {}),
        (report(other_node=replace(NODE, fetch_and_op=WAITS)), {}, "thread", {"progress": "Fetch_and_op...other node"}),
        (report(other_node=replace(NODE, fetch_and_op=NO_ANSWER)), {}, f"{ON} accumulate thread", {}),
        (report(replace(NODE, fetch_and_op=WAITS)), {}, f"{ON} accumulate off", {}),
        # Accumulate has a quarter of Put's bandwidth.
        *((report(other_node=replace(TCP, accumulate=replace(WAITS, gb_per_s=speed))), {}, f"{wanted} thread",
           {"reduction": f"{speed:.2g} GB/s, Put 1"})
          for speed, wanted in ((0.25, "accumulate"), (0.24, "mailbox"), (0.0, "mailbox"))),
        # One node's self-test has no speeds.
        (report(replace(NODE, accumulate=replace(WAITS, gb_per_s=None), put=replace(FAST, gb_per_s=None))), {},
         f"{ON} accumulate thread", {"reduction": "waits for the target (odc-mpi doctor"}),
        # A mailbox needs a thread even if puts and gets are one-sided; so does Accumulate, if set all the same.
        (report(other_node=SLOW_SUM), {}, "mailbox thread", {"progress": FULL}),
        (report(other_node=replace(SLOW_SUM, put=WAITS)), {}, "mailbox thread", {}),
        (report(other_node=SLOW_SUM), {"reduction": "accumulate"}, "accumulate thread", {}),
        (report(), {"reduction": "mailbox", "progress": "off"}, "mailbox off", {"progress": f"comm.progress...{FULL}"}),
        (replace(report(), thread_level="MPI_THREAD_SERIALIZED"), {"reduction": "mailbox"}, "mailbox off",
         {"progress": f"warning: {FULL}...MPI_THREAD_MULTIPLE, got MPI_THREAD_SERIALIZED"}),
        (SINGLE, {}, "off", {"progress": "warning...MPI_THREAD_MULTIPLE...SERIALIZED"}),
        # No answer counts against an operation. A peer that gave no answer at all is still there, as after a crash.
        (report(replace(NODE, get=NO_ANSWER)), {}, f"{ON} accumulate thread", {}),
        (report(replace(NODE, accumulate=NO_ANSWER)), {}, "mailbox thread", {}),
        (report(replace(NODE, accumulate=NO_ANSWER, put=NO_ANSWER)), {}, "accumulate thread", {"reduction": "no ans"}),
        (report(replace(NODE, accumulate=replace(FAST, one_sided=None))), {}, "accumulate thread", {}),
        (ProbeReport(), {}, "allocate off mailbox off", {}),
        (replace(report(None, NODE), peers=Peers()), {}, "accumulate thread",
         {"reduction": "Accumulate...other node gave no answer, nor did Put", "progress": "Get...gave no answer"}),
        # Without shared memory there is no zero-copy.
        *((replace(report(), shared_memory=shared), {}, "allocate off accumulate off",
           {"zero_copy": words, "window": words})
          for shared, words in (
              (SharedMemory(), "no answer"),
              (SharedMemory(readable=False, contiguous=True), "read"),
              (SharedMemory(readable=True, contiguous=False), "not contiguous"),
          )),
        # Settings win.
        (report(other_node=TCP), {"zero_copy": "off", "reduction": "mailbox", "progress": "off"},
         "allocate off mailbox off", {"zero_copy": "set by comm.zero_copy", "reduction": "set by comm.reduction"}),
        (report(), {"progress": "off"}, "off", {"progress": "set by comm.progress"}),
        (report(), {"progress": "thread"}, "thread", {}),
    ],
)  # fmt: skip
def test_what_is_used_and_why(found, settings, wanted, reasons):
    made = decide(found, CommConfig(**settings))
    assert f" {' '.join(choices(made))}".endswith(f" {wanted}")
    for name, words in reasons.items():
        says(getattr(made, name).reason, words)
        assert made.to_dict()[name] == {"choice": getattr(made, name).value, "reason": getattr(made, name).reason}


def test_one_line_has_the_choices_and_warnings():
    assert decide(report(other_node=TCP)).one_line() == "zero-copy on, gradients by MPI_Accumulate, progress thread"
    for found in (report(), replace(report(), thread_level="MPI_THREAD_SERIALIZED")):
        assert FULL in decide(found, CommConfig(reduction="mailbox", progress="off")).one_line()


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
    refused("comm.progress: thread requires MPI_THREAD_MULTIPLE", decide, SINGLE, CommConfig(progress="thread"))


def test_a_report_travels_as_json():
    found = report(other_node=replace(TCP, get=NO_ANSWER)).with_problem("other_node get", "no answer within 12 s: busy")
    assert ProbeReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert ProbeReport.from_dict(json.loads(json.dumps(ProbeReport().to_dict()))) == ProbeReport()


@pytest.mark.parametrize(
    ("name", "reduction", "refused"),
    [
        *(("get", "auto", True), ("accumulate", "auto", False), ("accumulate", "accumulate", True)),
        *(("put", "auto", False), ("put", "mailbox", True), ("fetch_and_op", "auto", False)),
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
