import pytest

from odc_mpi.probe.trial import repeat_for


def test_samples_until_the_time_is_over(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("odc_mpi.probe.trial.time.perf_counter", lambda: now[0])

    def sample():
        now[0] += 0.4
        return now[0]

    assert repeat_for(1.0, sample) == pytest.approx([0.4, 0.8, 1.2])
    assert len(repeat_for(1.0, sample, max_repeats=2)) == 2
    assert len(repeat_for(0.0, sample)) == 1, "one sample even without time"
