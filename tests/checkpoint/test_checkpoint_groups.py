"""Checkpoints of islands that train apart are found as groups, those after the same merge."""

import json
from types import SimpleNamespace

import pytest

from odc_mpi.checkpoint import groups
from odc_mpi.checkpoint.groups import checkpoint_groups, newest_directory
from odc_mpi.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that writes the checkpoints of a run, `{island: {step: merge}}`, as directories with metadata."""
    monkeypatch.setattr(
        groups, "read_manifest", lambda path: SimpleNamespace(metadata=json.loads((path / "manifest.json").read_text()))
    )

    def write(islands, own=(), members=None, clocks=()):
        for island, merges in islands.items():
            for step, merge in merges.items():
                folder = tmp_path / "islands" / str(island) / "checkpoints" / f"step_{step:08d}"
                folder.mkdir(parents=True)
                metadata = {"islands": {"size": len(islands), "index": island, "merge": merge}}
                if members:
                    metadata["islands"] |= {"members": members[merge], "clock": clocks[merge]}
                (folder / "manifest.json").write_text(json.dumps(metadata))
        for step in own:
            (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            (tmp_path / "checkpoints" / f"step_{step:08d}" / "manifest.json").write_text("{}")
        return tmp_path

    return write


def names(found):
    return [[f"{path.parents[1].name}/{path.name[-2:]}" for path in group] for group in found]


def test_a_group_has_a_checkpoint_of_each_island_after_the_same_merge(run):
    """Islands may be at different steps, and one may be a checkpoint ahead."""
    path = run({0: {10: 1, 21: 2, 30: 3}, 1: {9: 1, 20: 2}})
    wanted = [["0/10", "1/09"], ["0/21", "1/20"]]
    assert names(checkpoint_groups(path)) == wanted
    assert newest_directory(path).parents[1].name == "0" and newest_directory(path).name == "step_00000021"
    assert names(checkpoint_groups(path / "islands" / "1" / "checkpoints" / "step_00000009")) == wanted[:1]


def test_a_run_that_went_on_without_islands_has_the_newest_checkpoint(run):
    path = run({0: {10: 1}, 1: {10: 1}}, own=(4, 12))
    assert [len(group) for group in checkpoint_groups(path)] == [1, 2, 1]
    assert newest_directory(path) == path / "checkpoints" / "step_00000012"


def test_a_group_of_a_quorum_has_the_members_of_its_merge_and_the_place_of_its_clock(run):
    """The island that was late is at an earlier step. Of merge 3, one of the members has not saved yet."""
    path = run(
        {0: {10: 1, 40: 2}, 1: {10: 1, 41: 2}, 2: {10: 1, 12: 3}},
        members={1: [0, 1, 2], 2: [0, 1], 3: [0, 2]},
        clocks={1: 10, 2: 41, 3: 60},
    )
    assert names(checkpoint_groups(path)) == [["0/10", "1/10", "2/10"], ["0/40", "1/41"]]
    late = path / "islands" / "0" / "checkpoints" / "step_00000011"
    (path / "islands" / "0" / "checkpoints" / "step_00000040").rename(late)
    assert names(checkpoint_groups(path))[-1] == ["0/11", "1/41"], "the newest, also if its first island was late"


def test_the_directory_of_an_island_and_islands_without_a_common_merge(run, monkeypatch):
    path = run({0: {10: 1, 20: 2}, 1: {30: 3, 40: 4}})
    assert checkpoint_groups(path) == []
    assert newest_directory(path / "islands" / "0").name == "step_00000020"
    monkeypatch.chdir(path / "islands" / "1")
    assert newest_directory(groups.Path("checkpoints/step_00000030")).name == "step_00000030"
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint_groups(path / "islands")
