import time

import pytest

from odc_mpi.runtime.start.start_times import StartTimes, process_start


def test_phases_and_their_parts_add_up_to_the_time_since_the_start():
    began = process_start()
    assert 0 < time.perf_counter() - began < time.process_time() + 24 * 3600
    times = StartTimes(began)
    times.end("imports")
    time.sleep(0.05)
    times.end("other", windows=0.02, weights=0.01)
    assert (times.seconds["windows"], times.seconds["weights"]) == (0.02, 0.01)
    assert times.seconds["other"] >= 0.02
    assert sum(times.seconds.values()) == pytest.approx(time.perf_counter() - began, abs=0.1)
