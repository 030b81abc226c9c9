import math

import numpy as np
import pytest
from small_run import write_sequences

from odc_mpi.errors import UserError
from odc_mpi.simulate.lengths import KNOWN, LogNormal, find


@pytest.mark.parametrize("name", [name for name, lengths in KNOWN.items() if isinstance(lengths, LogNormal)])
def test_means_and_limits_are_those_of_the_data_set(name):
    lengths = find(name).draw(200_000, np.random.default_rng(0))
    assert lengths.dtype == np.int64 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(KNOWN[name].mean_tokens, rel=0.01)
    assert lengths.max() == KNOWN[name].max_tokens == find(name).max_tokens
    assert (lengths == lengths.max()).mean() < 0.02


def test_equal_lengths_are_equal():
    assert set(find("equal").draw(1000, np.random.default_rng(0))) == {find("equal").max_tokens}


def test_most_of_longalign_is_in_its_range():
    lengths = find("longalign").draw(100_000, np.random.default_rng(0))
    assert 0.7 < ((lengths >= 8192) & (lengths < 65_536)).mean() < 0.85


def test_an_uncut_distribution_is_where_the_formula_has_it():
    assert LogNormal(1000.0, 10**9, 0.5).location() == pytest.approx(math.log(1000) - 0.125, abs=1e-6)


def test_the_generator_decides():
    one, same, other = (find("aime").draw(50, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_a_data_set_gives_its_own_lengths(tmp_path):
    path = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    assert find(str(path)).max_tokens == 30
    lengths = find(str(path)).draw(3000, np.random.default_rng(0))
    assert set(lengths.tolist()) == {5, 20, 30}
    assert lengths.mean() == pytest.approx(55 / 3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "words"),
    [("longaling", ["did you mean longalign?"]), ("zzz", ["swesmith", "'zzz'"]), ("/nowhere/x.h5", ["/nowhere/x.h5"])],
)
def test_mistakes_are_told(name, words):
    with pytest.raises(UserError) as caught:
        find(name).draw(1, np.random.default_rng(0))
    assert all(word in str(caught.value) for word in words)


def test_a_damaged_data_set_names_the_option_of_this_command(tmp_path):
    path = tmp_path / "damaged.h5"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="change --lengths") as caught:
        find(str(path))
    assert "data.path" not in str(caught.value)
