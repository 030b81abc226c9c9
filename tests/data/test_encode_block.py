"""Several processes: the same bytes as from one, and no end of them that hangs or leaves something."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from processes import descendants, is_running
from rich.console import Console
from user_errors import refused

from odc_mpi.data import prepare as module
from odc_mpi.data.prepare import PrepareOptions, eval_output_path, prepare


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Some MB of chats, in many blocks, of which a few lines cannot be used."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for i in range(3000):
            turns = [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}. " * 9}]
            file.write(json.dumps({"messages": turns * (1 + i % 3)}) + "\n")
            if i % 500 == 499:
                file.write('{"messages": 3}\n')
    return path


@pytest.fixture(scope="module")
def tokenizer_path(chats):
    """A data set with a small tokenizer."""
    few = chats.with_name("few.jsonl")
    few.write_text('{"text": "What is it? It is 1234567890."}\n')
    return prepare([str(few)], chats.with_name("few.h5"), PrepareOptions(vocab_size=300)).path


@pytest.mark.timeout(300)
def test_the_same_bytes_from_any_number_of_processes(chats, tokenizer_path, tmp_path):
    """Also of a JSON array, whose texts are split."""
    more = tmp_path / "more.json.gz"
    texts = [{"text": f"It is {i}." * (1 + i % 50)} for i in range(2500)]
    more.write_bytes(gzip.compress(json.dumps(texts, indent=1).encode()))
    words = [f"{chats}:2", f"{more}:1"]
    written = []
    for num_proc in (1, 2):
        out = tmp_path / str(num_proc) / "out.h5"
        options = PrepareOptions(tokenizer=tokenizer_path, max_length=300, bad_lines="skip")
        report = prepare(words, out, replace(options, num_proc=num_proc, eval_fraction=0.1, overlong="split"))
        assert report.num_split
        assert (report.num_proc, report.num_bad_lines, len(report.bad_lines)) == (num_proc, 6, 3)
        written.append((out.read_bytes(), eval_output_path(out).read_bytes()))
    assert written[0] == written[1]
    [chat, functions] = report.shares
    assert chat[1] + functions[1] == report.num_sequences + report.num_eval_sequences
    assert "loss tokens (" in report.describe() and f"{chats}: {chat[1]:,} sequences (" in report.describe()


def test_a_second_call_finds_the_result(chats, tokenizer_path, tmp_path, monkeypatch):
    source, out = tmp_path / "a.jsonl", tmp_path / "a.h5"
    source.write_text("".join(json.dumps({"text": f"{i} some words"}) + "\n" for i in range(90)))
    options = PrepareOptions(tokenizer=tokenizer_path, eval_fraction=0.2)
    first = prepare([str(source)], out, options, Console(quiet=True))
    assert first.num_proc == 1, "little text"
    before = out.stat().st_mtime_ns  # reading may change the other times
    again = prepare([str(source)], out, replace(options, num_proc=2))
    assert again == replace(first, elapsed_s=None) and out.stat().st_mtime_ns == before
    assert again.describe().startswith(f"{out}: up to date (same sources, options and versions)")
    assert replace(again, elapsed_s=1.0).describe().splitlines()[1:3] == first.describe().splitlines()[1:3]
    for change in ({"max_length": 8}, {"eval_fraction": 0.3}, {"seed": 1}, {"tokenizer": None, "vocab_size": 270}):
        assert prepare([str(source)], out, replace(options, **change)).elapsed_s is not None, change
    prepare([str(source)], out, options)
    os.utime(source, ns=(1, 1))
    assert prepare([str(source)], out, options).elapsed_s is not None
    assert prepare([str(source)], out, options).elapsed_s is None
    monkeypatch.setattr(module, "__version__", "99")
    assert prepare([str(source)], out, options).elapsed_s is not None
    eval_output_path(out).unlink()
    assert prepare([str(source)], out, options).elapsed_s is not None
    out.write_bytes(out.read_bytes()[:1000])
    refused("a damaged one", prepare, [str(source)], out, options)


@pytest.mark.slow
def test_a_killed_worker_ends_the_call(chats, tokenizer_path, tmp_path):
    def kill_one():
        workers.extend(_children(os.getpid(), 2))
        os.kill(workers[1], signal.SIGKILL)

    workers = []
    killer = threading.Thread(target=kill_one)
    killer.start()
    options = PrepareOptions(tokenizer=tokenizer_path, bad_lines="skip", num_proc=2)
    refused("has ended early...memory...--num-proc 2", prepare, [str(chats)] * 50, tmp_path / "a.h5", options)
    killer.join()
    assert list(tmp_path.iterdir()) == []
    assert not any(map(is_running, workers))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_kill_ends_all_processes(chats, tokenizer_path, tmp_path, kill):
    many = [str(chats)] * 200
    command = [sys.executable, "-m", "odc_mpi", "prepare", *many, "--out", str(tmp_path / "a.h5")]
    command += ["--tokenizer", str(tokenizer_path), "--num-proc", "2", "--bad-lines", "skip"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        workers = _children(process.pid, 2)
        time.sleep(0.5)
        process.send_signal(kill)
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    if kill == signal.SIGINT:
        assert process.returncode == 130 and "odc-mpi: interrupted" in output and "Traceback" not in output
        assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 60
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(worker) for worker in workers)


def _children(pid, count):
    """Wait for `count` workers of a process; another child of it tracks shared resources."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        workers = [child for child, words in descendants(pid).items() if "spawn_main" in " ".join(words)]
        if len(workers) == count:
            return workers
        time.sleep(0.05)
    raise AssertionError(f"expected {count} processes")
