"""Programs of ranks of which one goes wrong: `python faulty_ranks.py PROGRAM TIMEOUT_S WORDS...`.

At fault is rank 1 or the last one. Programs without torch start in a second; the others are in `faulty_trainings.py`.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path


def sleep():
    time.sleep(60)


def fail(*_):
    raise KeyError("my own mistake")


def leave():
    sys.exit(5)


def raises(world, who="last", after=""):
    if after:
        world.gather_objects(None)
    if who == "all" or world.rank == world.size - 1:
        fail()
    world.gather_objects(None)


def fails_in_a_thread(world, thread):
    """Wait for the rank whose thread of this package ends, while no time limit expires."""
    work = fail if world.rank == world.size - 1 else lambda *_: None
    from odc_mpi.comm.progress import ProgressThread
    from odc_mpi.runtime.status import StatusPage

    if thread == "watchdog":
        StatusPage.heartbeat = work
    elif thread == "status":
        world.prepare_threads(work)
    else:
        ProgressThread(world, work)
    if world.rank == world.size - 1:
        time.sleep(30)
    world.gather_objects(None)


def fails_in_a_thread_of_its_own(world):
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    world.gather_objects(None)
    print("fine")


def stops_its_launcher(world, test):
    """Stop launchers and their helpers: all that this descends from, up to the test."""
    world.gather_objects(None)
    if world.rank == 1:
        above, process = [], os.getppid()
        while process != int(test):
            above.append(process)
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        Path("stopping").write_text(" ".join(map(str, above)))
        for process in above:
            os.kill(process, signal.SIGSTOP)
        fail()
    world.gather_objects(None)


def main():
    name, timeout_s, *words = sys.argv[1:]
    program = globals().get(name)
    if program is None:
        import faulty_trainings

        program = getattr(faulty_trainings, name)
    from odc_mpi import World

    program(World(timeout_s=float(timeout_s)), *words)


if __name__ == "__main__":
    main()
