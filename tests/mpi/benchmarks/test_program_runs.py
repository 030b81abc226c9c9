"""Short runs of programs in `benchmarks/` print their object. No figure is compared with another here."""

import pytest
from small_run import write_config, write_data
from train_speed import CONTENDERS

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

HEADER = ["benchmark", "library", "ranks", "nodes"]
VARIANTS = {
    *("memcpy", "fetch_zero_copy", "fetch_copy", "mpi_allgather"),
    *("push_accumulate", "push_mailbox", "mpi_reduce_scatter"),
}


@pytest.mark.sizes(2, 3)
def test_transport_speed(world, printed):
    """Few operations of each kind, and units of which the last of three ranks owns nothing, 25 elements."""
    result = printed("transport_speed", "--sizes", "256K,100", "--repeats", 2, "--json")
    assert list(result) == [*HEADER, "cores_per_rank", "repeats", "dtype", "load_average", "sizes"]
    assert (result["benchmark"], result["ranks"], result["nodes"], result["repeats"]) == ("transport", world.size, 1, 2)
    assert [size["size_bytes"] for size in result["sizes"]] == [256 << 10, 100]
    for size in result["sizes"]:
        assert list(size) == ["size_bytes", "num_units", "crossing_bytes", "all_at_once"]
        assert 0 <= size["crossing_bytes"] < size["size_bytes"] and size["num_units"] > 1
        assert set(size["all_at_once"]) == VARIANTS
        for name, entry in size["all_at_once"].items():
            assert list(entry) == ["seconds", "gb_per_s", "of_memcpy"]
            assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"]
            moves = name != "fetch_zero_copy"
            assert [entry[key] is not None for key in ("gb_per_s", "of_memcpy")] == [moves, moves]
        assert size["all_at_once"]["memcpy"]["of_memcpy"] == 1


@pytest.mark.sizes(1)
def test_transport_speed_prints_tables_on_one_rank(run):
    printed = run("transport_speed", "--sizes", "256K,100", "--repeats", 2)
    assert "1 rank on 1 node" in printed.out and "measuring units of 256K" in printed.err


@pytest.mark.slow
def test_train_speed(world, printed, shared_dir):
    directory = shared_dir / "train_speed"
    if world.rank == 0:
        directory.mkdir()
        write_config(write_data(directory / "small.h5"), directory)
    world.gather_objects(None)
    result = printed("train_speed", "--steps", 1, "--repeats", 1, "--config", directory / "config.yaml", "--json")
    for key in ("tokens_per_s", "quartiles", "ratio_to_fsdp2", "ratio_to_ceiling", "loss_deviation"):
        assert set(result[key]) == set(CONTENDERS), key
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["ratio_to_fsdp2"]["fsdp2"] == result["ratio_to_ceiling"]["ceiling"] == 1.0
    assert (result["benchmark"], result["ranks"], result["steps"], result["repeats"]) == ("train", 2, 1, 1)
    assert len(result["losses"]) == 2 and len(result["load_average"]) == 2


@pytest.mark.slow
def test_split_speed(printed):
    """Both train the same, and each sequence is split over the two ranks."""
    result = printed("split_speed", "--length", 64, "--steps", 1, "--repeats", 1)
    assert result["num_cut_sequences"] == result["num_sequences"] == 2 and result["loss_deviation"] < 1e-5
    assert result["ratio"]["median"] > 0 and set(result["tokens_per_s"]) == {"dynamic", "split"}


@pytest.mark.slow
def test_checkpoint(printed):
    result = printed("checkpoint", "--size", "1M", "--repeats", 1, "--dir", ".")
    assert len(result["variants"]) == 7 and len(result["goals"]) == 5


@pytest.mark.slow
def test_rollout_speed(printed):
    """On real ranks, as in the simulation, decoding for later steps pays, and no completion is older than allowed."""
    options = ("--per-rank", 2, "--completions", 4, "--minibatches", 4, "--scale", 0.004, "--staleness", 1, "--json")
    result = printed("rollout_speed", *options)["staleness"]
    assert result["0"]["staleness_max"] == 0 and result["1"]["staleness_max"] == 1
    assert result["1"]["simulated"] > 1 and result["1"]["step_s"] > 0.5 * result["1"]["simulated_s"]


@pytest.mark.slow
def test_load_speed(printed):
    """Each of two ranks reads its half of a model, and at most a part of a row more for each slice."""
    result = printed("load_speed", "--gigabytes", 0.01, "--dir", ".")
    half = result["file_bytes"] / 2
    assert len(result["ranks"]) == 2
    assert all(half <= rank["requested_bytes"] <= 1.05 * half for rank in result["ranks"])
