import threading

from odc_mpi.runtime.job import Progress


def test_all_tasks_run_and_return_if_any_made_progress():
    progress, calls = Progress(), []

    def task(name, found):
        calls.append(name)
        return found

    assert not progress.run_tasks()
    first, second = (lambda: task("first", True)), (lambda: task("second", False))
    progress.add(first)
    progress.add(second)
    assert progress.run_tasks() and calls == ["first", "second"]
    progress.remove(first)
    assert not progress.run_tasks() and calls[2:] == ["second"]


def test_one_thread_at_a_time_and_none_after_removal():
    progress, begun, go_on = Progress(), threading.Event(), threading.Event()

    def task():
        begun.set()
        return go_on.wait(10)

    progress.add(task)
    server = threading.Thread(target=progress.run_tasks)
    server.start()
    assert begun.wait(10)
    assert not progress.run_tasks(), "another thread is at it"
    remover = threading.Thread(target=progress.remove, args=(task,))
    remover.start()
    assert remover.is_alive(), "the task still runs"
    go_on.set()
    for thread in (server, remover):
        thread.join(10)
    begun.clear()
    assert not progress.run_tasks() and not begun.is_set()
