"""A thread sleeps until something comes over a TCP connection, or its time is over."""

import os
import socket
import threading
import time

import pytest

from odc_mpi.comm import socket_waiter as module
from odc_mpi.comm.socket_waiter import SocketWaiter


@pytest.fixture
def ends():
    """Return the two ends of a TCP connection, and a function that makes more."""
    opened = []

    def connect():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        opened.extend((near, far))
        return near, far

    near, far = connect()
    yield near, far, connect
    for end in opened:
        end.close()


def waited(arrivals, seconds):
    began = time.perf_counter()
    arrivals.wait(seconds)
    return time.perf_counter() - began


def test_nothing_comes(ends):
    arrivals = SocketWaiter()
    assert waited(arrivals, 0.05) >= 0.045
    assert arrivals.has_sockets


def test_what_comes_ends_the_wait(ends):
    near, far, _ = ends
    arrivals = SocketWaiter()
    arrivals.wait(0.0)
    sender = threading.Timer(0.05, far.sendall, [b"x"])
    sender.start()
    assert waited(arrivals, 20.0) < 10.0
    assert near.recv(1) == b"x", "what has come was taken away"
    sender.join()


def test_connections_made_later_count(ends, monkeypatch):
    monkeypatch.setattr(module, "RESCAN_S", 0.0)
    *_, connect = ends
    arrivals = SocketWaiter()
    arrivals.wait(0.002)
    _, far = connect()
    far.sendall(b"x")
    assert waited(arrivals, 20.0) < 10.0


def test_messages_without_a_reader_are_dropped_until_there_is_one(ends, monkeypatch):
    near, far, _ = ends
    far.sendall(b"x")
    arrivals = SocketWaiter()
    for _ in range(module.MAX_CONSECUTIVE + 1):
        arrivals.wait(5.0)
    monkeypatch.setattr(module, "RESCAN_S", 0.0)
    assert waited(arrivals, 0.05) >= 0.045
    near.recv(1)
    arrivals.wait(0.002)
    far.sendall(b"x")
    assert waited(arrivals, 20.0) < 10.0


def test_closed_connections_do_no_harm(ends, monkeypatch):
    near, far, _ = ends
    arrivals = SocketWaiter()
    arrivals.wait(0.002)
    near.close()
    far.close()
    arrivals.wait(0.05)  # hears that they are closed
    for _ in range(3):
        assert waited(arrivals, 0.05) >= 0.045
    monkeypatch.setattr(module, "RESCAN_S", 0.0)
    arrivals.wait(0.002)
    assert near.fileno() == -1


def test_other_sockets_do_not_count():
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"x")
        arrivals = SocketWaiter()
        assert waited(arrivals, 0.05) >= 0.045


@pytest.mark.parametrize("missing", ["timeout", "list"])
def test_without_a_list_of_files_it_sleeps(ends, tmp_path, monkeypatch, missing):
    """Or with a default timeout, with which reading the list would change the connections."""
    near, far, _ = ends
    far.sendall(b"x")
    if missing == "list":
        monkeypatch.setattr(module, "OPEN_FILES", tmp_path / "missing")
    else:
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 5.0)
    arrivals = SocketWaiter()
    assert waited(arrivals, 0.05) >= 0.045
    assert os.get_blocking(near.fileno()) and not arrivals.has_sockets
