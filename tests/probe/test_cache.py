"""Samples of a probe, and a kept report: used for a week on the same stack, and never if anything is wrong with it."""

import json
import os
import time

import pytest
from user_errors import refused

from odc_mpi.probe import cache
from odc_mpi.probe.report import ProbeReport
from odc_mpi.probe.trial import repeat_for

KEY = {"library": "MPICH 5.0.2", "settings": {"FI_PROVIDER": "tcp"}, "ranks": [[0, "a"], [1, "b"]]}
REPORT = ProbeReport(library="MPICH 5.0.2", nodes=2, ranks_per_node=(1, 1), shm_bytes=7)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "odc_mpi"


def test_it_is_private(home):
    previous = os.umask(0)
    try:
        cache.store(KEY, REPORT)
    finally:
        os.umask(previous)
    assert [path.stat().st_mode & 0o777 for path in (home, *home.iterdir())] == [0o700, 0o600]


def test_the_home_directory_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "odc_mpi"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a number that passwd does not know
    cache.store(KEY, REPORT)
    assert cache.load(KEY) is None


@pytest.mark.parametrize("change", [{"library": "MPICH 5.0.3"}, {"settings": {}}, {"ranks": [[0, "a"], [0, "a"]]}])
def test_another_stack_has_another_report(change):
    cache.store(KEY, REPORT)
    assert cache.load(KEY | change) is None


def test_a_file_of_another_key_is_not_taken(home):
    cache.store(KEY, REPORT)
    (path,) = home.iterdir()
    other = KEY | {"library": "MPICH 4"}
    path.rename(cache._path(other))
    assert cache.load(other) is None


def change_stored(home, change):
    """Store the report, and change its file's content."""
    cache.store(KEY, REPORT)
    (path,) = home.iterdir()
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report.pop("device"),
        lambda report: report.update(network="fast"),
        lambda report: report.update(peers=7),
        lambda report: report.update(nodes="two"),
        lambda report: report.update(problems=None),
        lambda report: report.update(shared_memory=None),
        lambda report: report["shared_memory"].update(speed="fast"),
        lambda report: report["peers"].update(same_node=[]),
        lambda report: report["peers"].update(same_node={"get": None}),
        lambda report: report["shared_memory"].pop("contiguous"),
    ],
)
def test_a_changed_report_is_none(home, change):
    change_stored(home, lambda kept: change(kept["report"]))
    assert cache.load(KEY) is None


@pytest.mark.parametrize("change", [{"device": None, "network": "fast"}, {"peers": {"same_node": {"get": None}}}])
def test_a_report_has_exactly_the_fields_of_its_class(change):
    refused("expected an object with", ProbeReport.from_dict, REPORT.to_dict() | change, error=ValueError)


@pytest.mark.parametrize(("age_s", "found"), [(6 * 86400, True), (8 * 86400, False), (-3600, False)])
def test_it_expires_after_a_week_unless_a_reader_keeps_it_longer(home, age_s, found):
    change_stored(home, lambda kept: kept.update(time_s=time.time() - age_s))
    assert (cache.load(KEY) is not None) == found
    assert (cache.load(KEY, 30 * 86400.0) is not None) == (age_s > 0)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[]", b"{}", b'{"time_s": "now"}', b"[" * 100_000],
)
def test_a_damaged_file_is_no_report(home, content):
    cache.store(KEY, REPORT)
    (path,) = home.iterdir()
    path.write_bytes(content)
    assert cache.load(KEY) is None
    cache.store(KEY, REPORT)
    assert cache.load(KEY) == REPORT


def test_a_place_that_cannot_be_written_is_no_matter(home, monkeypatch):
    home.parent.mkdir()
    home.write_text("a file where the folder should be")
    cache.store(KEY, REPORT)
    assert cache.load(KEY) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    cache.store(KEY, REPORT)
    assert cache.load(KEY) is None


def test_settings_are_those_that_change_what_the_library_does(monkeypatch):
    for name in list(os.environ):
        if name.startswith(cache._SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    monkeypatch.setenv("OMPI_MCA_osc", "^ucx")
    monkeypatch.setenv("OMPI_MCA_initial_wdir", "/somewhere")
    monkeypatch.setenv("PMIX_RANK", "3")
    assert cache.stack_key("MPICH")["settings"] == {"FI_PROVIDER": "tcp", "OMPI_MCA_osc": "^ucx", "UCX_TLS": "tcp"}


def test_samples_until_the_time_is_over(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("odc_mpi.probe.trial.time.perf_counter", lambda: now[0])

    def sample():
        now[0] += 0.4
        return now[0]

    assert repeat_for(1.0, sample) == pytest.approx([0.4, 0.8, 1.2])
    assert len(repeat_for(1.0, sample, max_repeats=2)) == 2
    assert len(repeat_for(0.0, sample)) == 1, "one sample even without time"
