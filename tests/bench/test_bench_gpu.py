"""The arithmetic, the choices and the report of `odc-mpi bench gpu`; what is measured is in tests/mpi."""

import argparse

import pytest
from gpu_result import LINKS, TIMES, result
from shown import shown

from odc_mpi.bench.contenders import Round
from odc_mpi.bench.gpu import benchmark as gpu
from odc_mpi.bench.gpu import kernels as gpu_kernels
from odc_mpi.bench.gpu import run as gpu_command
from odc_mpi.bench.gpu import step as gpu_step
from odc_mpi.bench.measure import entries, times_in
from odc_mpi.cli.main import parser
from odc_mpi.runtime.start.launch import Ending, Failure, FailureKind
from odc_mpi.stack.device_decision import RUN_DOCTOR
from odc_mpi.stack.report import Cause, DeviceWindows, Operation, Peer, Peers, Problem, Report

FAST = Operation(one_sided=True, idle_s=2e-6, busy_s=2e-6, gb_per_s=10.0)
MOVED = {"copy": 8 << 20, "add_fp32": 24 << 20, "add_fp32_torch": 24 << 20}


def test_a_sample_has_as_many_operations_as_fit():
    assert times_in(1e-3, 0.1, 1000) == 100
    assert times_in(1e-9, 0.1, 1000) == times_in(0.0, 0.1, 1000) == 1000
    assert times_in(5.0, 0.1, 1000) == 1


def test_speeds_are_of_the_whole_unit_and_ratios_of_the_same_round():
    found = entries(TIMES, 10**8, of_copy=lambda _: "copy_device", of_link=LINKS.get)
    assert found["copy_device"]["gb_per_s"] == {"low": 62.5, "median": 75.0, "high": 87.5}
    assert found["fetch_host"]["seconds"]["median"] == pytest.approx(30e-3)
    assert (found["fetch_host"]["of_copy"], found["fetch_host"]["of_link"]) == (0.05, 0.5)
    assert found["push_host_mailbox"]["of_link"] == pytest.approx(0.2)
    assert (found["fetch_device"]["of_copy"], found["fetch_device"]["of_link"]) == (0.25, None)


def test_bytes_are_counted_alike_for_the_copy_and_the_kernels():
    times = {"copy": [1.0, 2.0], "add_fp32": [3.0, 6.0], "add_fp32_torch": [9.0, 18.0]}
    found = gpu_kernels.task_entries(MOVED, times)
    assert found["add_fp32"]["of_copy"] == pytest.approx(1.0), "three times the bytes in three times the time"
    assert found["add_fp32"]["of_torch"] == pytest.approx(3.0)
    assert found["add_fp32_torch"]["of_copy"] == pytest.approx(1 / 3)
    assert found["add_fp32_torch"]["of_torch"] is None
    assert found["copy"]["gb_per_s"]["high"] == pytest.approx((8 << 20) / 1e9 * 0.875)


@pytest.mark.parametrize("numel", [1, 11, 12, 25, 1000, 10**6 + 1])
def test_pieces_leave_gaps_and_fit(numel):
    spans = gpu_kernels.cut(numel)
    assert len(spans) == min(gpu_kernels.PIECES, numel)
    assert all(length >= 1 for _, length in spans)
    ends = [start + length for start, length in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False)) and ends[-1] <= numel
    if numel >= 1000:
        assert all(end < start for end, (start, _) in zip(ends, spans[1:], strict=False))


def test_what_each_task_moves():
    class Host:
        torch_device = gpu_kernels.torch.device("cpu")

    tasks = gpu_kernels.Tasks(Host(), 4 * 12_000, with_kernels=True).by_name
    numel, laid = 12_000, 12 * (1000 - 32)
    moved = {name: task.moved_bytes for name, task in tasks.items() if not name.endswith("_torch")}
    assert moved == {
        "copy": 8 * numel,
        "add_fp32": (4 + 4 + 4 * 4) * numel,
        "add_bf16": (4 + 4 + 4 * 2) * numel,
        "flatten_fp32": 4 * laid + 4 * numel,
        "flatten_bf16": 2 * laid + 4 * numel,
    }
    assert all(tasks[f"{name}_torch"].moved_bytes == value for name, value in moved.items() if name != "copy")


def test_overhead_is_of_the_same_round_and_the_first_does_not_count():
    def rounds(*seconds):
        return [Round(own, 100, [2.0, 2.0]) for own in seconds]

    found = gpu_step.figures({"plain": rounds(99.0, 2.0, 4.0), "host_windows": rounds(1.0, 3.0, 6.0)})
    assert found["seconds"]["plain"] == {"low": 1.25, "median": 1.5, "high": 1.75}
    assert found["overhead"] == {"host_windows": {"low": 0.5, "median": 0.5, "high": 0.5}}
    assert found["tokens_per_s"] == {"plain": 37.5, "host_windows": pytest.approx(25.0)}


def report(*problems, **operations):
    device = DeviceWindows(("GPU",), window=True, own_accumulate=True, from_device=Peers(Peer(**operations)))
    problems = tuple(map(Problem.read, problems))
    host = Peers(Peer(FAST, FAST, FAST, FAST))
    return Report(nodes=1, ranks_per_node=(2,), peers=host, device=device, problems=problems)


ALL = {"get": FAST, "put": FAST, "accumulate": FAST}


@pytest.mark.parametrize(
    ("found", "wish", "against"),
    [
        (report(**ALL), "auto", {}),
        (report(get=FAST, put=FAST), "auto", {"accumulate": "not tried"}),
        (report(put=FAST, accumulate=FAST), "auto", {"accumulate": "Get", "mailbox": "Get"}),
        (Report(nodes=1, ranks_per_node=(2,)), "auto", {"accumulate": RUN_DOCTOR, "mailbox": RUN_DOCTOR}),
        (Report(nodes=1, ranks_per_node=(2,)), "cuda", {}),
        (report(), "cuda", {}),
        (report(f"from_device same_node accumulate: {Cause.WRONG.value}"), "cuda", {"accumulate": "wrong data"}),
        (
            report(f"from_device same_node get: {Cause.WRONG.value}"),
            "cuda",
            {"accumulate": "wrong data", "mailbox": "wrong data"},
        ),
        (report(**ALL), "cpu", {"accumulate": gpu.SET, "mailbox": gpu.SET}),
    ],
)
def test_the_doctor_s_verdict_is_followed_unless_a_person_insists(found, wish, against):
    judged = gpu.judge(found, wish)
    assert judged.keys() == against.keys()
    assert all(words in judged[name] for name, words in against.items())


def test_without_any_reduction_nothing_is_fetched():
    assert gpu.left_out({"accumulate": "crashed"}) == {"push_device_accumulate": "crashed"}
    assert list(gpu.left_out({"accumulate": "a", "mailbox": "b"})) == [
        "fetch_device",
        "push_device_accumulate",
        "push_device_mailbox",
    ]


def test_the_tables_fit_and_show_all():
    told = shown(result())
    assert "…" not in told
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert "2 ranks on 1 node, torch 2.13.0, 7 rounds" in told
    assert rows["windows"][-4:] == ["13,107", "+3.1%", "[+3.0%,", "+6.0%]"]
    assert "1,030 M parameters in bfloat16" in told
    lines = told.replace("±  ", "±").replace("± ", "±").splitlines()
    fetches, pushes = (line.split() for line in lines if line.strip().startswith("256M"))
    assert fetches[1] == "201" and fetches[-2] == "50.3" and len(fetches) == 11, "five columns of two words"
    assert len(pushes) == 11
    assert "0.33; 3.00" in told


def test_what_was_not_measured_has_no_column():
    made = result(on_device=False, with_kernels=False)
    told = shown(made)
    assert "left out: fetch_device, windows on GPUs were not tried" in told
    assert "windows on GPUs " not in told.split("A step of")[1]
    assert "0.11 (torch)" in told
    assert "GPUs,\n" not in told and "mailbox" in told
    made["step"], made["kernels"] = None, []
    assert "A step" not in shown(made)


def test_a_size_that_a_crash_left_without_windows_on_gpus():
    made = result()
    del made["sizes"][1]["variants"]["fetch_device"]
    fetches = next(line for line in shown(made).splitlines() if line.strip().startswith("256M"))
    assert fetches.split()[-1] == "-"


def ending(failure=None, **news):
    return Ending(
        {"result": {"sizes": [1], "left_out": {}}, "doing": None, "may_end": False, "error": None} | news,
        failure,
        "words",
    )


def test_windows_on_gpus_may_end_it():
    assert gpu_command.outcome(ending()) == ({"sizes": [1], "left_out": {}}, None)
    doing, crash = "units of 4M with windows on GPUs", Failure(FailureKind.CRASHED, "SIGSEGV", 1)
    found, failure = gpu_command.outcome(ending(crash, doing=doing, may_end=True))
    assert found["left_out"] == {"device_windows": f"{doing}: crashed (SIGSEGV on rank 1)"} and failure is None
    found, failure = gpu_command.outcome(ending(crash, doing="kernels on shards of 4M"))
    assert found["left_out"] == {} and failure == f"kernels on shards of 4M: {crash}"
    assert gpu_command.outcome(ending(doing="steps"))[1] == "steps: ended early"
    assert gpu_command.outcome(Ending({}, crash, "")) == ({}, f"starting MPI: {crash}")


def test_the_child_is_asked_for_the_same():
    words = ["bench", "gpu", "--sizes", "1M,4K", "--steps", "2", "--window-device", "cuda", "--config", "x.yaml"]
    asked = gpu_command.options(parser().parse_args([*words, "--ranks", "3", "--timeout-s", "50"]))
    assert asked["sizes"] == [1 << 20, 4096] and (asked["ranks"], asked["timeout_s"]) == (3, 50)
    assert gpu.Options(**asked).window_device == "cuda"
    assert isinstance(parser(), argparse.ArgumentParser)
