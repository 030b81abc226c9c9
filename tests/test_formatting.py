import pytest

from odc_mpi.formatting import did_you_mean, format_seconds, format_size, printable_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(31.2, "31 s"), (3.14, "3.1 s"), (0.25, "250 ms"), (2e-4, "0.2 ms"), (9.94e-5, "99 us"), (1.5e-6, "1.5 us")],
)
def test_times_are_short(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(65536, "64K"), (1 << 20, "1M"), (2 << 30, "2G"), (12, "12"), (1536, "1536"), (1025, "1025")],
)
def test_sizes_lose_nothing(size, text):
    assert format_size(size) == text


def test_the_most_similar_name():
    assert did_you_mean("lineer", {"linear": 1, "quadratic": 2}) == " (did you mean linear?)"
    assert did_you_mean("lineer", ["linear"], ": {}") == ": did you mean linear?"
    assert did_you_mean("zzz", ["linear"]) == ""


def test_escaped_characters_can_be_printed():
    assert printable_text("a\x1b[1m\ud800\x85\r\n\tü\u2028") == "a\\x1b[1m\\ud800\\x85\\x0d\n\tü\u2028"
