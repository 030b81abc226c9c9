import threading
import time

import pytest

from odc_mpi.runtime.deadline import Watchdog


class Calls:
    def __init__(self):
        self.seen = []
        self.called = threading.Event()

    def __call__(self, what, waited_s):
        self.seen.append(what)
        self.called.set()
        return 0.0


def test_a_deadline_is_extended_as_long_as_the_callback_says():
    waited = []
    is_over = threading.Event()

    def on_expiry(wait, waited_s):
        waited.append(waited_s)
        if len(waited) < 3:
            return 0.1
        is_over.set()
        return 0.0

    watchdog = Watchdog(0.1, on_expiry)
    with watchdog.watch("generating"):
        assert is_over.wait(10.0)
    watchdog._thread.join(5.0)
    assert not watchdog._thread.is_alive()
    assert len(waited) == 3 and all(seconds > 0.1 * i for i, seconds in enumerate(waited, start=1))


def test_a_wait_that_ended_is_forgotten():
    calls = Calls()
    watchdog = Watchdog(0.3, calls)
    for _ in range(6):
        with watchdog.watch("short"):
            time.sleep(0.1)
    with pytest.raises(ZeroDivisionError), watchdog.watch("failed"):
        raise ZeroDivisionError
    time.sleep(0.5)
    assert calls.seen == [] and watchdog._waits == {}
    watchdog.close()


def test_of_nested_waits_the_late_one_is_named():
    calls, deadline = Calls(), time.monotonic() + 10.0
    watchdog = Watchdog(1.0, calls)

    def busy():
        while not calls.called.is_set() and time.monotonic() < deadline:
            with watchdog.watch("inner"):
                calls.called.wait(0.002)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    with watchdog.watch("stuck"):
        busy()
    for thread in threads:
        thread.join(5.0)
    assert calls.seen == ["stuck"] and watchdog._waits == {}


def test_a_closed_one_is_silent():
    calls = Calls()
    watchdog = Watchdog(0.2, calls)
    watchdog.close()
    watchdog.close()
    with watchdog.watch("long"):
        watchdog._thread.join(5.0)
        assert not watchdog._thread.is_alive()
        time.sleep(0.3)
    assert calls.seen == []


def test_heartbeats_continue_while_it_waits_and_while_not():
    polls = []
    watchdog = Watchdog(0.5, Calls(), lambda: polls.append(time.monotonic()))
    time.sleep(0.4)
    with watchdog.watch("short"):
        time.sleep(0.4)
    assert len(polls) >= 4
    watchdog.close()
    watchdog._thread.join(5.0)
    assert not watchdog._thread.is_alive()
