"""Location of windows, decided from faked reports of devices: on the device if all requirements are proved."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
from user_errors import refused, says

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
        shared_memory=SharedMemory(readable=True, contiguous=True),
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


CRASH = "crashed (SIGSEGV on rank 1)"
SLOW = OperationResult(one_sided=False, idle_s=1e-3, busy_s=1.0, gb_per_s=0.1)
UNTRIED = replace(report(), device=None)
ALONE = replace(report(None), ranks_per_node=(1,), peers=Peers())


@pytest.mark.parametrize(
    ("found", "settings", "wanted", "reasons"),
    [
        # Without a verdict the host is used, and a line suggests the probe.
        (UNTRIED, {}, "cpu accumulate", {"window_device": RUN_DOCTOR}),
        (report(Peer()).with_problem("device same_node get", CRASH), {}, "cpu accumulate", {"window_device": CRASH}),
        (report(Peer(get=FAST, put=FAST), own_accumulate=None).with_problem("device same_node accumulate", CRASH), {},
         "cuda mailbox", {"reduction": f"Accumulate with a peer on the same node, on GPUs: {CRASH}"}),
        (report(window=None).with_problem("device memory", "CuPy does not import"), {}, "cpu",
         {"window_device": "cannot be created (device memory: CuPy does not import)"}),
        (report(window=None), {}, "cpu", {"window_device": "no answer"}),
        # Who insists is warned where nothing is proved; it is not known whether they wait.
        (UNTRIED, {"window_device": "cuda"}, "cuda mailbox thread",
         {"window_device": f"set by comm.window_device; warning: ...{RUN_DOCTOR}"}),
        (report(), {"window_device": "cuda"}, "cuda accumulate", {"window_device": "set by comm.window_device"}),
        (report(Peer(get=FAST, put=FAST)), {"window_device": "cuda", "reduction": "accumulate"}, "cuda accumulate",
         {"window_device": "warning: Accumulate with a peer"}),
        # Accumulate has to work in the own window, and is compared with Put.
        *((report(own_accumulate=works), {}, "cuda mailbox", {}) for works in (False, None)),
        (report(Peer(get=FAST, accumulate=FAST), own_accumulate=False), {}, "cpu", {}),
        (report(replace(PROVED, accumulate=SLOW)), {}, "cuda mailbox", {"reduction": "0.1 GB/s, Put 10"}),
        # A way that is slower than by the host is not taken.
        (report(replace(PROVED, get=replace(FAST, gb_per_s=2.5))), {}, "cuda", {}),
        (report(replace(PROVED, get=replace(FAST, gb_per_s=2.4))), {}, "cpu",
         {"window_device": "Get from a peer on the same node moves 2.4 GB/s between GPUs, 10 between hosts"}),
        # A thread serves where devices wait, or tickets, which are drawn from the host's memory.
        (report(), {}, "cuda accumulate off", {}),
        (report(Peer(get=WAITS, put=FAST, accumulate=FAST)), {}, "cuda accumulate thread",
         {"progress": "3.1 s against 0.2 ms"}),
        (replace(report(other_node=PROVED), peers=Peers(ALL, replace(ALL, fetch_and_op=WAITS))), {},
         "cuda accumulate thread", {}),
        # Alone a rank needs nothing of MPI and no probe; with zero_copy off: in windows, which were not tried.
        (ALONE, {}, "cuda mailbox off", {}),
        (replace(ALONE, device=None), {}, "cuda mailbox", {}),
        *((replace(ALONE, device=None), settings, "cpu", {})
          for settings in ({"window_device": "cpu"}, {"zero_copy": "off"})),
    ],
)  # fmt: skip
def test_where_windows_are_and_why(found, settings, wanted, reasons):
    decision = made(found, **settings)
    assert " ".join((*choices(decision), decision.progress.value)).startswith(wanted)
    for name, words in reasons.items():
        says(getattr(decision, name).reason, words)
    assert ("warning" in decision.window_device.reason) == ("warning" in str(reasons))


def test_all_else_is_as_without_a_gpu_where_nothing_was_tried_and_windows_there_are_not_mentioned_without_one():
    decision, without = made(UNTRIED), decide(report())
    assert f"windows in host memory (windows on GPUs were not tried: {RUN_DOCTOR})" in decision.one_line()
    assert replace(decision, window_device=None) == decide(UNTRIED) and without.window_device is None
    assert without.to_dict().keys() == {"window", "zero_copy", "reduction", "progress", "node_cache"}
    assert "windows" not in without.one_line() and RUN_DOCTOR not in made(replace(ALONE, device=None)).one_line()
    assert made(replace(ALONE, device=None)).zero_copy.value == "on"


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


def test_settings_that_do_not_go_together():
    refused("comm.window_device: cuda...got run.device cpu", decide, report(), CommConfig(window_device="cuda"))
    for setting in ("auto", "cpu"):
        assert decide(report(), CommConfig(window_device=setting)).window_device is None
