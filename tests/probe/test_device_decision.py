"""Location of windows, decided from faked reports of devices: on the device if all requirements are proved."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
from user_errors import refused

from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.probe.decision import decide, require_correct_data
from odc_mpi.probe.device_decision import RUN_DOCTOR
from odc_mpi.probe.report import WRONG, DeviceWindows, OperationResult, Peer, Peers, ProbeReport, SharedMemory

FAST = OperationResult(one_sided=True, idle_s=2e-6, busy_s=2e-6, gb_per_s=10.0)
WAITS = OperationResult(one_sided=False, idle_s=2e-4, busy_s=3.1, gb_per_s=10.0)
NO_ANSWER = OperationResult()
ALL = Peer(FAST, FAST, FAST, FAST)
PROVED = Peer(get=FAST, put=FAST, accumulate=FAST)


def report(same_node=PROVED, other_node=None, **device):
    two = other_node is not None
    device = {"names": ("GPU",), "window": True, "own_accumulate": True} | device
    return ProbeReport(
        library="Open MPI 5.0.11",
        thread_level="MPI_THREAD_MULTIPLE",
        nodes=2 if two else 1,
        ranks_per_node=(2, 2) if two else (2,),
        shared_memory=SharedMemory(readable=True, contiguous=True, load_s=3e-7),
        peers=Peers(ALL, ALL if two else None),
        device=DeviceWindows(peers=Peers(same_node, other_node), **device),
    )


def made(found, **settings):
    return decide(found, CommConfig(**settings), on_device=True)


def choices(decision):
    return decision.window_device.value, decision.reduction.value


@pytest.mark.parametrize(
    "answered", list(itertools.product([True, False], repeat=3)), ids=lambda flags: "".join("np"[f] for f in flags)
)
@pytest.mark.parametrize("kind", ["same_node", "other_node"])
def test_every_combination_of_what_is_proved(answered, kind):
    names = ("get", "put", "accumulate")
    peer = Peer(**{name: FAST if yes else NO_ANSWER for name, yes in zip(names, answered, strict=True)})
    found = report(**{"other_node": PROVED, kind: peer})
    decision, proved = made(found), dict(zip(names, answered, strict=True))
    if not proved["get"] or not (proved["put"] or proved["accumulate"]):
        assert choices(decision)[0] == "cpu"
        assert "on GPUs: not tried" in decision.window_device.reason
        assert decision.zero_copy.value == "on", "all else is as without a GPU"
    else:
        assert choices(decision) == ("cuda", "accumulate" if proved["accumulate"] else "mailbox")
        assert (decision.window.value, decision.zero_copy.value) == ("create", "off")


def test_without_a_verdict_the_host_is_used_and_a_line_suggests_the_probe():
    found = replace(report(), device=None)
    decision = made(found)
    assert choices(decision) == ("cpu", "accumulate")
    assert decision.window_device.reason.endswith(RUN_DOCTOR)
    assert f"windows in host memory (windows on GPUs were not tried: {RUN_DOCTOR})" in decision.one_line()
    assert replace(decision, window_device=None) == decide(found), "all else is as without a GPU"


def test_without_a_gpu_windows_there_are_not_mentioned():
    decision = decide(report())
    assert decision.window_device is None
    assert decision.to_dict().keys() == {"window", "zero_copy", "reduction", "progress", "node_cache"}
    assert "windows" not in decision.one_line()


def test_a_crash_is_the_reason():
    crash = "crashed (SIGSEGV on rank 1)"
    found = report(Peer(get=FAST, put=FAST), own_accumulate=None)
    found = found.with_problem("device same_node accumulate", crash)
    decision = made(found)
    assert choices(decision) == ("cuda", "mailbox")
    assert decision.reduction.reason == f"Accumulate with a peer on the same node, on GPUs: {crash}"
    found = report(Peer()).with_problem("device same_node get", crash)
    decision = made(found)
    assert choices(decision) == ("cpu", "accumulate")
    assert crash in decision.window_device.reason


@pytest.mark.parametrize(
    ("name", "reduction", "refused"),
    [("get", "auto", True), ("put", "mailbox", True), ("put", "accumulate", False), ("accumulate", "auto", False)],
)
def test_wrong_data_is_refused_even_to_who_insists(name, reduction, refused):
    found = report(replace(PROVED, **{name: NO_ANSWER})).with_problem(f"device same_node {name}", WRONG)
    by_itself = {"get": ("cpu", "accumulate"), "put": ("cuda", "accumulate"), "accumulate": ("cuda", "mailbox")}
    assert choices(made(found)) == by_itself[name]
    decision = made(found, window_device="cuda", reduction=reduction)
    words = f"{name.title()} with a peer on the same node, on devices, delivers wrong data .* comm.window_device to cpu"
    with pytest.raises(UserError, match=words) if refused else nullcontext():
        require_correct_data(found, decision)


def test_wrong_data_between_devices_is_no_matter_where_windows_are_on_the_host():
    found = report().with_problem("device same_node get", WRONG)
    require_correct_data(found, made(found, window_device="cpu"))
    on_host = report().with_problem("same_node get", WRONG)
    require_correct_data(on_host, made(on_host))
    refused("Get ... wrong data ... another MPI", require_correct_data, on_host, made(on_host, window_device="cpu"))


def test_who_insists_is_warned_where_nothing_is_proved():
    decision = made(replace(report(), device=None), window_device="cuda")
    assert choices(decision) == ("cuda", "mailbox")
    assert decision.window_device.reason == (
        f"set by comm.window_device; warning: windows on GPUs were not tried: {RUN_DOCTOR}"
    )
    assert decision.progress.value == "thread", "it is not known whether they wait"
    assert made(report(), window_device="cuda").window_device.reason == "set by comm.window_device"
    wanted = made(report(Peer(get=FAST, put=FAST)), window_device="cuda", reduction="accumulate")
    assert choices(wanted) == ("cuda", "accumulate")
    assert "warning: Accumulate with a peer" in wanted.window_device.reason


def test_accumulate_has_to_work_in_the_own_window():
    assert choices(made(report(own_accumulate=False))) == ("cuda", "mailbox")
    assert choices(made(report(own_accumulate=None))) == ("cuda", "mailbox")
    nothing_else = report(Peer(get=FAST, accumulate=FAST), own_accumulate=False)
    assert choices(made(nothing_else))[0] == "cpu"


def test_the_reason_is_reported_if_no_window_can_be_created():
    found = report(window=None).with_problem("device memory", "CuPy does not import")
    assert made(found).window_device.reason == (
        "windows on GPUs cannot be created (device memory: CuPy does not import)"
    )
    assert "no answer" in made(report(window=None)).window_device.reason


def test_accumulate_is_compared_with_put():
    slow = OperationResult(one_sided=False, idle_s=1e-3, busy_s=1.0, gb_per_s=0.1)
    decision = made(report(replace(PROVED, accumulate=slow)))
    assert choices(decision) == ("cuda", "mailbox")
    assert "0.1 GB/s, Put 10" in decision.reduction.reason


@pytest.mark.parametrize(("gb_per_s", "wanted"), [(2.5, "cuda"), (2.4, "cpu")])
def test_a_way_that_is_slower_than_by_the_host_is_not_taken(gb_per_s, wanted):
    decision = made(report(replace(PROVED, get=replace(FAST, gb_per_s=gb_per_s))))
    assert decision.window_device.value == wanted
    assert wanted == "cuda" or decision.window_device.reason == (
        "Get from a peer on the same node moves 2.4 GB/s between GPUs, 10 between hosts"
    )


def test_a_thread_serves_where_devices_wait():
    decision = made(report(Peer(get=WAITS, put=FAST, accumulate=FAST)))
    assert (decision.window_device.value, decision.progress.value) == ("cuda", "thread")
    assert "3.1 s against 0.2 ms" in decision.progress.reason
    assert made(report()).progress.value == "off"
    tickets = replace(report(other_node=PROVED), peers=Peers(ALL, replace(ALL, fetch_and_op=WAITS)))
    assert made(tickets).progress.value == "thread", "tickets are drawn from the host's memory"


def test_alone_a_rank_needs_nothing_of_mpi_and_no_probe():
    single_rank = replace(report(None), ranks_per_node=(1,), peers=Peers())
    assert choices(made(single_rank)) == ("cuda", "mailbox")
    assert made(single_rank).progress.value == "off"
    untried = replace(single_rank, device=None)
    assert choices(made(untried)) == ("cuda", "mailbox") and made(untried).zero_copy.value == "on"
    assert RUN_DOCTOR not in made(untried).one_line()
    for settings in ({"window_device": "cpu"}, {"zero_copy": "off"}):  # off: in windows, which were not tried
        assert choices(made(untried, **settings))[0] == "cpu"


def test_settings_that_do_not_go_together():
    refused("comm.window_device: cuda...got run.device cpu", decide, report(), CommConfig(window_device="cuda"))
    for setting in ("auto", "cpu"):
        assert decide(report(), CommConfig(window_device=setting)).window_device is None
