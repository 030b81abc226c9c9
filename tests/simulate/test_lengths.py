import numpy as np
import pytest
from pair_files import write_pairs
from small_run import write_sequences

from odc_mpi.errors import UserError
from odc_mpi.simulate.lengths import KNOWN_DISTRIBUTIONS, lengths_by_name


@pytest.mark.parametrize(("name", "mean"), [("longalign", 16_500), ("swesmith", 34_700), ("aime", 9_000)])
def test_means_and_limits_are_those_of_the_data_set(name, mean):
    lengths = lengths_by_name(name).sample(200_000, np.random.default_rng(0))
    assert lengths.dtype == np.int64 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.max() == KNOWN_DISTRIBUTIONS[name].max_tokens == lengths_by_name(name).max_tokens
    assert (lengths == lengths.max()).mean() < 0.02


def test_a_data_set_gives_its_own_lengths(tmp_path):
    path = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    assert lengths_by_name(str(path)).max_tokens == 30
    lengths = lengths_by_name(str(path)).sample(3000, np.random.default_rng(0))
    assert set(lengths.tolist()) == {5, 20, 30}
    assert lengths.mean() == pytest.approx(55 / 3, rel=0.05)
    write_pairs(tmp_path / "pairs.h5", [(3, 2, 5), (1, 4, 1)])
    lengths = lengths_by_name(str(tmp_path / "pairs.h5")).sample(100, np.random.default_rng(0))
    assert set(lengths.tolist()) == {10, 6}


@pytest.mark.parametrize(
    ("name", "words"),
    [("longaling", ["did you mean longalign?"]), ("zzz", ["swesmith", "'zzz'"]), ("/nowhere/x.h5", ["/nowhere/x.h5"])],
)
def test_user_errors_are_reported(name, words):
    with pytest.raises(UserError) as caught:
        lengths_by_name(name).sample(1, np.random.default_rng(0))
    assert all(word in str(caught.value) for word in words)


def test_a_damaged_data_set_names_the_option_of_this_command(tmp_path):
    path = tmp_path / "damaged.h5"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="change --lengths") as caught:
        lengths_by_name(str(path))
    assert "data.path" not in str(caught.value)
