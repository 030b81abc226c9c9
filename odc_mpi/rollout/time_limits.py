"""Calls of reward functions with a time limit, in the main thread and in others.

- In the main thread, an alarm signal raises an exception in the function, also in most calls into C.
- In other threads, the function runs in a thread of its own. After the limit, an exception is raised in it each second
  until it ends. The caller continues without it, also if it is stuck in a call into C.
- Asynchronous functions run in one event loop in a thread. After the limit, they are canceled.
"""

import asyncio
import concurrent.futures
import ctypes
import functools
import inspect
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Seconds between the exceptions that are raised in a function that does not end.
_REPEAT_S = 1.0


class ExpiredError(BaseException):
    """Raised when the time limit expires. Not an `Exception`, because functions with retries may catch those."""


def start(function: Any, **kwargs: Any) -> Callable[[float], Any]:
    """Start a function if it is asynchronous. Return a callable that takes a limit in seconds and returns the result.

    It calls the function if that is not asynchronous. It raises what the function raises, or `ExpiredError` if the
    function does not return within the limit.
    """
    if any(map(inspect.iscoroutinefunction, (function, function.__call__))):
        return functools.partial(_wait, asyncio.run_coroutine_threadsafe(function(**kwargs), _event_loop()))
    return functools.partial(_run, functools.partial(function, **kwargs))


def _wait(future: "concurrent.futures.Future[Any]", timeout_s: float) -> Any:
    with suppress(concurrent.futures.TimeoutError):
        return future.result(timeout_s)
    if future.done():  # the function itself has raised the error
        return future.result()
    future.cancel()
    raise ExpiredError


def _run(call: Callable[[], Any], timeout_s: float) -> Any:
    if threading.current_thread() is threading.main_thread():
        with _alarm(timeout_s):
            return call()
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        with suppress(ExpiredError):
            try:
                results.put((call(), None))
            except BaseException as error:  # the caller raises it
                results.put((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        value, error = results.get(timeout=timeout_s)
    except queue.Empty:
        threading.Thread(target=_interrupt, args=(thread,), daemon=True).start()
        raise ExpiredError from None
    if error is not None:
        raise error
    return value


def _interrupt(thread: threading.Thread) -> None:
    """Raise `ExpiredError` in a thread until it ends. A call into C only notices when it returns."""
    while thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ExpiredError))
        thread.join(_REPEAT_S)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread. There is one for all calls, because HTTP clients depend on theirs."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit):  # raised by a function
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Context manager that raises `ExpiredError` after `timeout_s`, then every second if caught. Main thread only."""
    running, expired = True, False

    def expire(number: int, frame: object) -> None:
        nonlocal expired
        expired = True
        if running:
            raise ExpiredError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, _REPEAT_S)
    try:
        try:
            yield
        finally:
            running = False
    finally:  # also if the signal arrives just before `running` becomes False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if expired:
        raise ExpiredError
